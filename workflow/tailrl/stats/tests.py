"""Differences with their intervals and p values, on plain arrays.

Each function names its unit of repetition: seeds (another training run), problems (another set of held-out problems) or
clusters of tokens (another batch of rollouts). A single unit gives no interval and no p: both are NaN.
"""

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tailrl.stats.intervals import CONFIDENCE, UPPER, Interval

SPLITS = 9_999
"""The largest number of splits in a permutation test."""

CONSTANT = 1e-12
"""Values that differ by less are equal up to rounding."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of first minus second, its interval and two-sided p (NaN where there is none), and n units."""

    mean: float
    low: float
    high: float
    p: float
    n: int


NO_DIFFERENCE = Difference(math.nan, math.nan, math.nan, math.nan, 0)
"""Where nothing was measured, or for the reference itself."""


def paired_difference(first_P: ArrayLike, second_P: ArrayLike) -> Difference:
    """Two policies' scores on the same problems, (P,), paired: the interval is over problems, for *these policies*."""
    return difference_from(np.asarray(first_P, dtype=np.float64) - np.asarray(second_P, dtype=np.float64), 0.0)


def difference_from(
    values_N: ArrayLike, reference: float, exact: Collection[float] = (0.0,), confidence: float = CONFIDENCE
) -> Difference:
    """The mean of independent values, (N,), any unit, minus a fixed number; NaN entries (not measured) are left out.

    Values that all agree have no interval, for their variance is unknown. If they are one of the `exact` numbers, they
    agree by nature, such as zeros of an engine without mismatch: the interval is then a point.
    """
    values = np.asarray(values_N, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not values.size:
        return NO_DIFFERENCE
    mean = float(values.mean()) - reference
    if values.size < 2 or np.ptp(values) < CONSTANT:
        if values.size > 1 and any(abs(values[0] - number) < CONSTANT for number in exact):
            return Difference(mean, mean, mean, 1.0 if abs(mean) < CONSTANT else 0.0, values.size)
        return unvaried(mean, values.size)
    return _difference(mean, stats.ttest_1samp(values - reference, 0.0), values.size, confidence)


def arm_difference(first_S: ArrayLike, second_S: ArrayLike) -> Difference:
    """Two arms by one score per seed, (S,) and (S',): Welch's test over seeds; n is the smaller number of seeds.

    Runs with the same seed start from the same rollouts, but diverge after a few updates. Pairing them would gain
    little and halve the degrees of freedom. The remaining positive correlation can only make Welch's interval too wide.
    """
    first, second = np.asarray(first_S, dtype=np.float64), np.asarray(second_S, dtype=np.float64)
    mean, n = float(first.mean() - second.mean()), min(first.size, second.size)
    if n < 2 or max(np.ptp(first), np.ptp(second)) < CONSTANT:
        return unvaried(mean, n)
    with warnings.catch_warnings():
        # scipy warns where all seeds of one arm agree; Welch's formula still holds.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(first, second, equal_var=False)
    return _difference(mean, test, n)


def arm_contrast(scores_A: Sequence[ArrayLike], weights_A: Sequence[float]) -> Difference:
    """A weighted sum of arms' means, such as a difference of two differences, by their seeds' scores.

    This is Welch's test for any number of arms: squared errors add up, with Satterthwaite's degrees of freedom. With
    two arms and weights 1 and -1 it equals `arm_difference`. scores_A has for each arm (S,), one score per seed;
    weights_A must not be 0; n is the smallest number of seeds.
    """
    scores = [np.asarray(scores_S, dtype=np.float64) for scores_S in scores_A]
    mean = float(sum(w * s.mean() for s, w in zip(scores, weights_A, strict=True)))
    n = min(s.size for s in scores)
    if n < 2 or max(np.ptp(s) for s in scores) < CONSTANT:
        return unvaried(mean, n)
    squares_A = np.array([w**2 * s.var(ddof=1) / s.size for s, w in zip(scores, weights_A, strict=True)])
    freedom = squares_A.sum() ** 2 / sum(square**2 / (s.size - 1) for s, square in zip(scores, squares_A, strict=True))
    return t_difference(mean, squares_A.sum(), freedom, n)


def t_difference(mean: float, square: float, freedom: float, n: int) -> Difference:
    """A difference from its squared standard error and t's degrees of freedom."""
    error = math.sqrt(square)
    half = float(stats.t.ppf(UPPER, freedom)) * error
    return Difference(mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, freedom)), n)


def holm(p_M: ArrayLike) -> NDArray[np.float64]:
    """Holm's adjusted p of M tests, (M,): control of the family-wise error rate.

    NaN entries are tests that could not be made: they stay NaN and do not count.
    """
    p = np.asarray(p_M, dtype=np.float64)
    order = np.argsort(p)[: int((~np.isnan(p)).sum())]
    adjusted = np.full(p.size, math.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(order.size, 0, -1)), 1.0)
    return adjusted


def one_sided(difference: Difference) -> tuple[float, float]:
    """p of the two one-sided tests behind a two-sided test: that the difference is above 0, and that it is below."""
    seen, other = difference.p / 2, 1 - difference.p / 2
    return (seen, other) if difference.mean > 0 else (other, seen)


def above_and_below(mean: Interval) -> tuple[float, float]:
    """One-sided p that a mean is above 0, and below, by the t distribution of its interval; NaN without an interval."""
    if math.isnan(mean.low) or mean.low == mean.high:
        return math.nan, math.nan
    student = stats.t(mean.n - 1)
    t = student.ppf(UPPER) * mean.mean / ((mean.high - mean.low) / 2)
    return float(student.sf(t)), float(student.cdf(t))


def all_hold(*parts: tuple[float, float]) -> tuple[float, float]:
    """p of a claim whose parts must all hold, and p of its opposite, from each part's pair of p.

    The claim has an intersection-union test. A single part that fails refutes it, with Bonferroni's correction. NaN in
    any part gives NaN.
    """
    holds, fails = zip(*parts, strict=True)
    return float(np.max(holds)), float(np.minimum(1.0, len(parts) * np.min(fails)))


def _difference(mean: float, test: Any, n: int, confidence: float = CONFIDENCE) -> Difference:
    interval = test.confidence_interval(confidence)
    return Difference(mean, float(interval.low), float(interval.high), float(test.pvalue), n)


def unvaried(mean: float, n: int) -> Difference:
    """A difference without an interval: all seeds of an arm agree, or each arm has a single seed.

    Scores are counts, so that seeds can agree by chance; the variance stays unknown. p is 1 if repeated seeds show no
    difference at all, else NaN.
    """
    return Difference(mean, math.nan, math.nan, 1.0 if n > 1 and abs(mean) < CONSTANT else math.nan, n)
