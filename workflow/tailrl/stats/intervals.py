"""Means and shares with their confidence intervals, on plain arrays."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailrl.stats.student import t_quantile

CONFIDENCE = 0.95
"""The level of every interval in the report."""

LEVEL = 1 - CONFIDENCE
"""The significance level of an adjusted two-sided p."""

EQUIVALENCE_CONFIDENCE = 0.90
"""The level of the interval that must lie within a margin of equivalence: two one-sided tests at 5 % each."""

ONE_SIDED_LEVEL = LEVEL / 2
"""The significance level of each of the two one-sided tests behind a verdict."""

UPPER = (1 + CONFIDENCE) / 2
"""The quantile at the upper end of a two-sided interval."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, its interval (NaN where there is none) and its number of units n."""

    mean: float
    low: float
    high: float
    n: int


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)
"""Where nothing was measured."""


def known_mean(values_N: ArrayLike) -> float:
    """The mean of what is not NaN; NaN where nothing is."""
    value_N = np.asarray(values_N, dtype=np.float64)
    known_N = value_N[~np.isnan(value_N)]
    return float(known_N.mean()) if known_N.size else math.nan


def mean_interval(values_N: ArrayLike) -> Interval:
    """The t interval of a mean over independent values, (N,), any unit; NaN entries (not measured) are left out."""
    values = np.asarray(values_N, dtype=np.float64)
    values = values[~np.isnan(values)]
    return _t_interval(float(values.mean()), _standard_error(values), values.size) if values.size else NO_INTERVAL


def geometric_interval(values_N: ArrayLike) -> Interval:
    """The geometric mean of the values above 0, (N,), with the t interval of their logarithms."""
    value_N = np.asarray(values_N, dtype=np.float64)
    logs = mean_interval(np.log(value_N[value_N > 0]))
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)


def log_slope(x_M: ArrayLike, y_M: ArrayLike) -> float:
    """The slope of ln y against ln x by least squares; NaN where a value is not above 0, or not known."""
    values_2M = np.array([x_M, y_M], dtype=np.float64)
    if not (values_2M > 0).all():
        return math.nan
    slope, _ = np.polyfit(np.log(values_2M[0]), np.log(values_2M[1]), 1)
    return float(slope)


def problem_interval(correct_PK: ArrayLike) -> Interval:
    """The interval of one policy's avg@k, from K samples of P problems, (P, K), 0 or 1; problems are the clusters.

    This is the t interval of the per-problem means. With equal k it equals the cluster-robust interval, and it needs no
    random numbers. If all samples are right, or all wrong, the variance cannot be estimated. The exact binomial
    interval of P problems then stands in.
    """
    score_P = np.asarray(correct_PK, dtype=np.float64).mean(axis=1)
    score = float(score_P.mean())
    if score in (0.0, 1.0) and score_P.size > 1:
        # Of 0 or n successes in n trials Clopper and Pearson's interval has a closed form.
        width = 1 - (LEVEL / 2) ** (1 / score_P.size)
        return Interval(score, score * (1 - width), score + (1 - score) * width, score_P.size)
    return mean_interval(score_P)


def cluster_interval(values_T: ArrayLike, clusters_T: ArrayLike) -> Interval:
    """The interval of a mean over T values that are clustered, such as tokens of one step.

    The mean is a ratio, sum of values over number of values. Its error comes from the clusters' residual sums, and t
    has (clusters - 1) degrees of freedom. Values are (T,), in any unit, with each value's cluster; n counts clusters.
    """
    values = np.asarray(values_T, dtype=np.float64)
    return ratio_interval(values, np.ones_like(values), clusters_T)


def ratio_interval(above_T: ArrayLike, below_T: ArrayLike, clusters_T: ArrayLike) -> Interval:
    """The interval of a ratio of two sums, Σ above / Σ below, whose terms are clustered.

    Terms are (T,), in any unit, with each term's cluster; n counts clusters. NaN if `below_T` sums to 0.
    """
    above, below = np.asarray(above_T, dtype=np.float64), np.asarray(below_T, dtype=np.float64)
    names, cluster_T = np.unique(np.asarray(clusters_T), return_inverse=True)
    if not below.sum():
        return NO_INTERVAL
    ratio = float(above.sum() / below.sum())
    residual_G = np.bincount(cluster_T, weights=above - ratio * below, minlength=names.size).astype(np.float64)
    return _t_interval(ratio, _standard_error(residual_G) * names.size / float(below.sum()), names.size)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Σ above / Σ below of terms [T] that are clustered; clusters are numbers, NaN: a cluster of its own."""

    above_T: NDArray[np.float64]
    below_T: NDArray[np.float64]
    cluster_T: NDArray[np.float64]


def ratio_difference(first: Ratio, second: Ratio) -> Interval:
    """The interval of the second ratio minus the first; clusters that both share are paired.

    Each cluster's influence on the difference is the sum of its influences on both ratios, so what a shared cluster
    adds to both cancels. t has (clusters - 1) degrees of freedom, n counts clusters. NaN if a ratio has no terms.
    """
    if not (first.below_T.sum() and second.below_T.sum()):
        return NO_INTERVAL
    values, influences, clusters = [], [], []
    for ratio, sign in ((first, -1.0), (second, 1.0)):
        below = float(ratio.below_T.sum())
        values.append(float(ratio.above_T.sum()) / below)
        influences.append(sign * (ratio.above_T - values[-1] * ratio.below_T) / below)
        clusters.append(ratio.cluster_T)
    cluster_T = np.concatenate(clusters)
    alone_T = np.isnan(cluster_T)
    names, place_T = np.unique(cluster_T[~alone_T], return_inverse=True)
    shared_G = np.bincount(place_T, np.concatenate(influences)[~alone_T], minlength=names.size)
    influence_G = np.concatenate([shared_G, np.concatenate(influences)[alone_T]])
    count = influence_G.size
    error = math.sqrt(count / (count - 1) * float((influence_G**2).sum())) if count > 1 else math.nan
    return _t_interval(values[1] - values[0], error, count)


def share_interval(count: int, n: int) -> Interval:
    """A share of n independent trials with Wilson's interval, which holds at shares of 0 and 1 too."""
    return Interval(*_wilson(count, n), n)


def share_difference(first: tuple[int, int], second: tuple[int, int]) -> Interval:
    """Newcombe's interval of a difference of two shares, each as (count, trials); it holds at shares of 0 and 1 too.

    Newcombe combines Wilson's interval of each share. Both need at least one trial; n is the smaller number of trials.
    """
    (p, low, high), (q, below, above) = _wilson(*first), _wilson(*second)
    ends = math.hypot(p - low, above - q), math.hypot(high - p, q - below)
    return Interval(p - q, p - q - ends[0], p - q + ends[1], min(first[1], second[1]))


def _wilson(count: int, n: int) -> tuple[float, float, float]:
    z = NormalDist().inv_cdf(UPPER)
    share = count / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At a share of 0 or 1 an end is that share; rounding would miss it.
    return share, (middle - half if count else 0.0), (middle + half if count < n else 1.0)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(values.size)) if values.size > 1 else math.nan


def _t_interval(mean: float, standard_error: float, n: int) -> Interval:
    half = t_quantile(UPPER, n - 1) * standard_error if n > 1 else math.nan
    return Interval(mean, mean - half, mean + half, n)
