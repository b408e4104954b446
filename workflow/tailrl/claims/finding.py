"""What a claim is, what arms show of it, and the list of all claims: what `claims` fills and `verdicts` decides."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tailrl.artifacts.results import Results
from tailrl.stats.tests import Difference

DVP, VEXACT = "arXiv 2512.23087", "arXiv 2605.14220"
OPEN = "open question"
"""Where claims come from: the papers, and what they leave open."""

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
        outcome: where no test decides: a fact, or that there is nothing to test.
    """

    arms: tuple[str, ...]
    seeds: int
    effect: float
    low: float
    high: float
    words: str
    p_for: float = math.nan
    p_against: float = math.nan
    outcome: str | None = None


Find = Callable[[Results], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A paper's statement and its source; the unit of the effect; the tests that it is counted with; what it takes."""

    statement: str
    source: str
    unit: str
    family: str
    needs: str
    find: Find


CLAIMS: list[Claim] = []
"""Every claim, in the order of the report."""


def claim(statement: str, source: str, *, unit: str, family: str, needs: str) -> Callable[[Find], Find]:
    """Lists the function that finds where a claim can be tested."""

    def add(find: Find) -> Find:
        CLAIMS.append(Claim(statement, source, unit, family, needs, find))
        return find

    return add


def interval(mean: float, low: float, high: float, *, form: str = ".3g") -> str:
    return f"{mean:{form}}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


def measured(
    arms: tuple[str, ...], measure: Difference, ends: Sequence[float], words: str, p_for: float = math.nan,
    p_against: float = math.nan,
) -> Finding:  # fmt: skip
    """A finding on the runs of a measure; that there is nothing to test where it has none."""
    effect, low, high = ends
    return Finding(arms, measure.n, effect, low, high, words, p_for, p_against) if measure.n else nothing(arms)


def opposite(finding: Finding) -> Finding:
    """The finding for the claim of the other direction: that what was tested to lie above lies below."""
    return replace(finding, p_for=finding.p_against, p_against=finding.p_for)


def nothing(arms: tuple[str, ...]) -> Finding:
    return Finding(arms, 0, math.nan, math.nan, math.nan, "no run recorded what it takes", outcome=UNTESTABLE)
