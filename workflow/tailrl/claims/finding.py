"""The outcomes of a claim, and what arms show of it before the number of tests is accounted for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailrl.stats.tests import Difference

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "not decided"
UNTESTABLE = "not testable at this scale"
CHANGES = "a difference is shown"
"""Of a question that has no direction: whether a setting matters."""
MEASURED = "measured"
"""Of a question whose answer is a figure."""
ASIDE = "premise fails"
"""Of a theorem where what it assumes does not hold."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What some arms show of a claim, before the number of tests is accounted for.

    Attributes:
        arms: those compared, first the one that the claim is about.
        seeds: the runs behind it, of the arm with fewest.
        effect, low, high: the endpoint with its interval over seeds, in the claim's unit; NaN where there is none.
        words: what was seen.
        p_for, p_against: one-sided p that the claim's direction holds, and that its opposite does.
        holds: whether a fact does; beside a test, False where no p can show the claim.
        outcome: where there is nothing to decide.
    """

    arms: tuple[str, ...]
    seeds: int
    effect: float
    low: float
    high: float
    words: str
    p_for: float = math.nan
    p_against: float = math.nan
    holds: bool | None = None
    outcome: str | None = None


def interval(mean: float, low: float, high: float, *, form: str = ".3g") -> str:
    """A number with its interval, or alone where there is none."""
    return f"{mean:{form}}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


def measured(
    arms: tuple[str, ...], measure: Difference, ends: Sequence[float], words: str, p_for: float = math.nan,
    p_against: float = math.nan,
) -> Finding:  # fmt: skip
    """A finding on the runs of a measure; that there is nothing to test where it has none."""
    effect, low, high = ends
    return Finding(arms, measure.n, effect, low, high, words, p_for, p_against) if measure.n else nothing(arms)


def changed(arms: tuple[str, ...], seeds: int, change: Difference, words: str) -> Finding:
    """A finding on a change of either direction: half of its p is that of a one-sided test."""
    return Finding(arms, seeds, change.mean, change.low, change.high, words, p_for=change.p / 2)


def fact(arms: tuple[str, ...], seeds: int, effect: float, words: str, holds: bool | None) -> Finding:
    """A finding that needs no test; None: there is nothing to test."""
    outcome = UNTESTABLE if holds is None else None
    return Finding(arms, seeds, effect, math.nan, math.nan, words, holds=holds, outcome=outcome)


def opposite(finding: Finding) -> Finding:
    """The finding for the claim of the other direction: that what was tested to lie above lies below."""
    return replace(finding, p_for=finding.p_against, p_against=finding.p_for)


def nothing(arms: tuple[str, ...], words: str = "no run recorded what it takes") -> Finding:
    """Some arms have nothing to test."""
    return fact(arms, 0, math.nan, words, None)
