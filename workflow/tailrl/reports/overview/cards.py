"""The verdicts of a study as cards: a card a claim, those that the study decides first."""

from collections.abc import Sequence
from dataclasses import dataclass

from tailrl.artifacts.claims import Verdict
from tailrl.claims.finding import CHANGES, CONTRADICTED, MEASURED, NOT_SEEN, REPRODUCED, UNDECIDED

DECIDED_GROUP, OPEN_GROUP, MEASURED_GROUP, SILENT_GROUP = "Decided", "Not decided", "Measured", "Not tested here"

GROUP_OF = {
    REPRODUCED: DECIDED_GROUP,
    CONTRADICTED: DECIDED_GROUP,
    CHANGES: DECIDED_GROUP,
    UNDECIDED: OPEN_GROUP,
    NOT_SEEN: OPEN_GROUP,
    MEASURED: MEASURED_GROUP,
}
"""The groups of verdicts; the study cannot speak to a claim with any other verdict."""

GROUPS = (DECIDED_GROUP, OPEN_GROUP, MEASURED_GROUP, SILENT_GROUP)

SCORE_UNIT = "share of samples"
"""The unit of claims on held-out scores."""


@dataclass(frozen=True, slots=True)
class Card:
    """A claim with its lines, one for each set of arms; `group` is the first group that any of them has."""

    claim: Verdict
    group: str
    lines: tuple[Verdict, ...]


def cards(verdicts: Sequence[Verdict]) -> dict[str, list[Card]]:
    """The cards of each group: those on scores first, else claims and their lines in the order of the verdicts."""
    by_claim: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_claim.setdefault(verdict.id, []).append(verdict)
    found: dict[str, list[Card]] = {group: [] for group in GROUPS}
    for lines in by_claim.values():
        lines.sort(key=lambda line: GROUPS.index(_group(line)))
        group = _group(lines[0])
        found[group].append(Card(lines[0], group, tuple(lines)))
    for own in found.values():
        own.sort(key=lambda card: card.claim.unit != SCORE_UNIT)
    return found


def tally(found: dict[str, list[Card]]) -> str:
    """How many claims each group has, each claim counted once."""
    decided, undecided, measured, silent = (len(found[group]) for group in GROUPS)
    return (
        f"Claims: {decided} decided (for at least one set of arms), {undecided} not decided, {measured} measured, "
        f"{silent} to which this study cannot speak."
    )


def _group(line: Verdict) -> str:
    return GROUP_OF.get(line.verdict, SILENT_GROUP)
