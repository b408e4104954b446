"""What a statement of the papers is, in the table of all of them."""

from dataclasses import dataclass

WARNING = "make dose_response dvp_at_zero stale tim_isolated early_warning"
"""What makes early warnings: runs that collapse and runs that do not, by the studies' names, and the look at them."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A row of the table of all claims.

    Attributes:
        part: the heading that it stands under.
        id: never changes; text: the statement or the question.
        by: ids of the claims that decide it; `*` stands for any part of an id.
        figures: of a study that show it, the best one first.
        command: what makes a run that speaks to it.
        only: how the names of the studies begin whose lines count; empty for all.
        held_by: the test that holds a definition.
        beyond: why no run at this scale decides it, where none can.
    """

    part: str
    id: str
    text: str
    by: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    command: str = ""
    only: str = ""
    held_by: str = ""
    beyond: str = ""
