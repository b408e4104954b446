"""The outcomes of a claim, and findings: what arms show of it before the correction for multiple tests."""

import math
from dataclasses import dataclass, replace

from tailrl.stats.intervals import Interval
from tailrl.stats.tests import Difference

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "not decided"
UNTESTABLE = "not testable at this scale"
"""No run can decide it: none measures what it takes."""
NOT_SEEN = "tested and not seen"
"""Runs measure it, and what the claim is about happens in none of them, such as a collapse."""
CHANGES = "a difference is shown"
"""For a question without a direction: whether a setting matters."""
MEASURED = "measured"
"""For a question whose answer is a number."""
ASIDE = "premise fails"
"""For a theorem whose assumption does not hold."""
DEFINITION, OPEN = "definition", "not run yet"
"""For a statement without evidence: a test verifies it, or no study has run."""
ALIKE, DIFFERS = "level", "differs"
"""Of two arms with a margin of equivalence; else UNDECIDED."""
MIXED = "differs between claims or settings"
"""For a statement whose lines decide in several ways."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What some arms show of a claim, before the correction for multiple tests.

    Attributes:
        arms: the compared arms, first the one that the claim is about.
        seeds: the runs of the arm with fewest.
        effect, low, high: the endpoint with its interval over seeds, in the claim's unit; NaN if there is none.
        words: what was seen.
        p_for, p_against: one-sided p that the claim's direction holds, and that its opposite holds.
        holds: whether a fact holds; for a test, False if no p can show the claim.
        events: how often the claim's subject occurred, such as a collapse; None if it needs no event.
        premise: whether the theorem's assumption holds.
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
    events: int | None = None
    premise: bool = True


def measured(
    arms: tuple[str, ...],
    effect: Interval | Difference,
    words: str,
    p_for: float = math.nan,
    p_against: float = math.nan,
) -> Finding:
    """A finding on the runs that an effect is measured by; nothing to test if there are none."""
    if not effect.n:
        return nothing(arms)
    return Finding(arms, effect.n, effect.mean, effect.low, effect.high, words, p_for, p_against)


def changed(arms: tuple[str, ...], seeds: int, change: Difference, words: str) -> Finding:
    """A finding on a change of either direction; half of its p is the one-sided p."""
    return Finding(arms, seeds, change.mean, change.low, change.high, words, p_for=change.p / 2)


def fact(arms: tuple[str, ...], seeds: int, effect: float, words: str, holds: bool | None) -> Finding:
    """A finding that needs no test; None for nothing to test."""
    events = 0 if holds is None else None
    return Finding(arms, seeds, effect, math.nan, math.nan, words, holds=holds, events=events)


def opposite(finding: Finding) -> Finding:
    """The finding for the claim of the other direction: below instead of above."""
    return replace(finding, p_for=finding.p_against, p_against=finding.p_for)


def nothing(arms: tuple[str, ...], words: str = "no run recorded what it takes") -> Finding:
    """A finding that these arms have nothing to test."""
    return fact(arms, 0, math.nan, words, None)
