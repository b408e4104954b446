"""What a statement of the papers is, in the table of all of them, and how the claims of an ablation are named."""

from dataclasses import dataclass

ABLATION = "ablation of "
"""How the claims of an ablation begin; the field follows."""

AS_GOOD = ", as good within a margin"
"""How the claims of an ablation end that a value is as good as the base arm's."""

LASTS = ", steps before a collapse"
"""How the claims of an ablation end that a value makes runs collapse sooner or later."""

WARNING = "make dose_response dvp_at_zero stale tim_isolated early_warning"
"""What makes early warnings: runs that collapse and runs that do not, by the studies' names, and the look at them."""

ACROSS = "across studies: "
"""How the claims of a comparison of studies begin; the quantity follows."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A row of the table of all claims.

    Attributes:
        part: the heading that it stands under.
        text: the statement or the question.
        by: claims that decide it, as `claims.csv` files name them; one that ends in … stands for all that begin so.
        figures: of a study that show it, the best one first.
        command: what makes a run that speaks to it.
        only: how the names of the studies begin whose lines count; empty for all.
        held_by: the test that holds a definition.
        beyond: why no run at this scale decides it, where none can.
    """

    part: str
    text: str
    by: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    command: str = ""
    only: str = ""
    held_by: str = ""
    beyond: str = ""
