"""What claims are measured by: one number a run, and findings made of such numbers."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from tailrl.analysis import arm_kinds
from tailrl.artifacts.results import FloatArray, Results, TrainedRun
from tailrl.claims.finding import Finding, interval, measured, nothing
from tailrl.stats.tests import Difference, arm_difference, one_sided
from tailrl.tracking.metrics import K1_UNMASKED, K3_MASKED, K3_UNMASKED

MASKED, UNMASKED, UNMASKED_K1 = K3_MASKED, K3_UNMASKED, K1_UNMASKED

PART = 0.1
"""Share of a run's steps that its start, its end and each stretch of it are."""

_POWERS = 14.0
"""Powers of ten that a magnitude lies from 1 at most: zeros (below rounding) and overflows count as the nearer end."""


def scores(
    results: Results, first: arm_kinds.Role, second: arm_kinds.Role, *, apart: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """avg@k of arms in one part less that of arms in another, over seeds (Welch), for the claim that it is above 0."""
    for arms in arm_kinds.pairs(results, first, second, apart=apart):
        found = arm_difference(*([score.avg_at_k for score in results.evaluations[arm].scores] for arm in arms))
        ends = (found.mean, found.low, found.high)
        points = interval(*[100 * end for end in ends], form="+.1f")
        words = f"avg@k of {arms[0]} less that of {arms[1]} is {points} points"
        yield measured(arms, found, ends, words, *one_sided(found))


def stretches(run: TrainedRun, key: str) -> list[float]:
    """A metric's means over stretches of a tenth of the run's steps; NaN where none of a stretch was recorded."""
    values_N = run.metric(key)
    size = math.ceil(PART * values_N.size)
    return [mean(values_N[start : start + size]) for start in range(0, values_N.size, size)]


def first_and_last(run: TrainedRun, key: str) -> tuple[float, float]:
    """A metric's means over the first and the last tenth of the run's steps."""
    values_N = run.metric(key)
    size = math.ceil(PART * values_N.size)
    return mean(values_N[:size]), mean(values_N[-size:])


def growth(run: TrainedRun, key: str = UNMASKED) -> float:
    """Powers of ten by which a run's unmasked k3, or the size of another metric, grows from its first tenth to its
    last."""
    first, last = np.abs(first_and_last(run, key))
    return float(log10(last) - log10(first))


def mean(values: FloatArray) -> float:
    """The mean of what was recorded; NaN where nothing was."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def log10(values: ArrayLike) -> FloatArray:
    """Powers of ten, within what counts as a number at all."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(values), -_POWERS, _POWERS)


def powers(logs: Difference) -> tuple[float, float, float]:
    """A mean of logarithms and its interval, as numbers."""
    with np.errstate(over="ignore"):
        middle, low, high = (float(np.float64(10.0) ** end) for end in (logs.mean, logs.low, logs.high))
    return middle, low, high


def ratio_of_runs(arms: tuple[str, str], logs: Sequence[FloatArray], words: str) -> Finding:
    """The ratio of two geometric means over runs, for the claim that it is above 1."""
    known = [logs_S[~np.isnan(logs_S)] for logs_S in logs]
    if not all(logs_S.size for logs_S in known):
        return nothing(arms)
    ratio = arm_difference(*known)
    said = words.format(arms[0], interval(*powers(ratio)), arms[1])
    return measured(arms, ratio, powers(ratio), said, *one_sided(ratio))
