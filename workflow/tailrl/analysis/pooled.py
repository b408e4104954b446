"""The parts of a study pooled: each remedy less a reference, with the warm start as the unit of repetition.

A part is a study with a warm start of its own; its score of an arm is the mean over its seeds. An arm is called
<cause>_<what>. The remedies of a cause are its arms but <cause>_naive and <cause>_control.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from tailrl.analysis.parts import CONTROL, NAIVE, Numbers, differences
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, arm_difference, difference_from, holm


@dataclass(frozen=True, slots=True)
class Pooled:
    """avg@k of a remedy less that of a reference, shares of 1.

    Attributes:
        less: `naive` (primary) and `control`, of the same cause, or `exact`.
        difference: the mean over warm starts of the differences within a warm start, with a paired t interval. With one
            warm start the interval is over its seeds (Welch), and there is no p.
        p_holm: p by Holm over the remedies of the cause.
        least, most: the smallest and the largest difference within a warm start.
    """

    cause: str
    remedy: str
    less: str
    difference: Difference
    p_holm: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class PooledScore:
    """avg@k of an arm over warm starts, shares of 1; with one warm start the interval is over its seeds.

    Attributes:
        warm_starts, seeds: how many have the arm, and how many policies they have in all.
    """

    arm: str
    score: Interval
    warm_starts: int
    seeds: int


def pooled(parts: Sequence[Numbers]) -> list[Pooled]:
    """Every remedy less each of its references, cause by cause, from avg@k by arm in each part.

    A pair is of the parts that have both arms.
    """
    found = []
    for cause, remedies in _causes(parts).items():
        own = {less: f"{cause}_{less}" for less in (NAIVE, CONTROL)}
        for less, reference in {**own, "exact": "exact"}.items():
            rows = [_less(parts, f"{cause}_{remedy}", reference) for remedy in remedies]
            adjusted = holm([difference.p for difference, *_ in rows]).tolist()
            found += [
                Pooled(cause, remedy, less, difference, p, *ends)
                for remedy, (difference, *ends), p in zip(remedies, rows, adjusted, strict=True)
            ]
    return found


def pooled_scores(parts: Sequence[Numbers]) -> list[PooledScore]:
    """Every arm's score, in the parts' order."""
    found = []
    for arm in _arms(parts):
        own = [part[arm] for part in parts if arm in part]
        units = [float(np.mean(score_S)) for score_S in own] if len(own) > 1 else own[0]
        found.append(PooledScore(arm, mean_interval(units), len(own), sum(map(len, own))))
    return found


def _arms(parts: Sequence[Numbers]) -> Iterator[str]:
    yield from dict.fromkeys(arm for part in parts for arm in part)


def _causes(parts: Sequence[Numbers]) -> dict[str, list[str]]:
    """The remedies of each cause."""
    arms = list(_arms(parts))
    causes = [arm.removesuffix(f"_{NAIVE}") for arm in arms if arm.endswith(f"_{NAIVE}")]
    own = {cause: [arm.removeprefix(f"{cause}_") for arm in arms if arm.startswith(f"{cause}_")] for cause in causes}
    return {cause: [name for name in names if name not in (NAIVE, CONTROL)] for cause, names in own.items()}


def _less(parts: Sequence[Numbers], arm: str, reference: str) -> tuple[Difference, float, float]:
    """The pooled difference, and the smallest and the largest within a warm start; NaN where no part has both."""
    within = differences(parts, arm, reference)
    if not within:
        return NO_DIFFERENCE, nan, nan
    if len(within) > 1:
        found = difference_from(list(within.values()), 0.0)
    else:
        (part,) = (parts[place] for place in within)
        found = replace(arm_difference(part[arm], part[reference]), p=nan)
    return found, min(within.values()), max(within.values())
