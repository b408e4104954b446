"""Intervals and differences for the report, on plain arrays; scipy has the distributions.

Each function names its unit of repetition, since that is what an interval is about: seeds (another
training run), problems (another set of held-out problems) or clusters of tokens (another batch of
rollouts). A single unit gives no interval: its ends are NaN, and so is p.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95
"""The level of every interval in the report."""

SPLITS = 9_999
"""Splits of the runs that a permutation test looks at, at most."""

_CONSTANT = 1e-12
"""Values that differ by less than this are equal: rounding, not a variance to divide by."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, its interval (NaN where there is none) and the number n of units that it rests on."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of first minus second, its interval and two-sided p (NaN where there is none), units n."""

    mean: float
    low: float
    high: float
    p: float
    n: int


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)
"""Where nothing was measured."""

NO_DIFFERENCE = Difference(math.nan, math.nan, math.nan, math.nan, 0)
"""Where there is nothing to compare: nothing was measured, or it is what the others are held against."""


def mean_interval(values_N: ArrayLike) -> Interval:
    """The t interval of a mean over N independent values, such as one score per seed.

    Args:
        values_N: (N,), any unit; NaN entries (nothing was measured) are left out.
    """
    values = np.asarray(values_N, dtype=np.float64)
    values = values[~np.isnan(values)]
    if values.size == 0:
        return NO_INTERVAL
    return _t_interval(float(values.mean()), _standard_error(values), values.size)


def problem_interval(correct_PK: ArrayLike) -> Interval:
    """The interval of one policy's avg@k over P problems with k samples each; problems are the clusters.

    A t interval of the per-problem means: with equal k that is the cluster-robust interval, and unlike a
    bootstrap it needs no random numbers. Where all samples are right (or all wrong) there is no variance
    to estimate from, and the exact binomial interval of P problems stands in: wide, not empty.

    Args:
        correct_PK: (P, K), 0 or 1.
    """
    score_P = np.asarray(correct_PK, dtype=np.float64).mean(axis=1)
    score = float(score_P.mean())
    if score in (0.0, 1.0) and score_P.size > 1:
        exact = stats.binomtest(round(score) * score_P.size, score_P.size).proportion_ci(CONFIDENCE)
        return Interval(score, float(exact.low), float(exact.high), score_P.size)
    return mean_interval(score_P)


def cluster_interval(values_T: ArrayLike, clusters_T: ArrayLike) -> Interval:
    """The interval of a mean over T values that are alike within a cluster, such as tokens of one step.

    The mean is a ratio (sum of values over number of values), so its error is that of the clusters'
    residual sums, with t on (clusters - 1) degrees of freedom.

    Args:
        values_T: (T,), any unit.
        clusters_T: (T,), the cluster of each value; n counts clusters.
    """
    values = np.asarray(values_T, dtype=np.float64)
    return ratio_interval(values, np.ones_like(values), clusters_T)


def ratio_interval(above_T: ArrayLike, below_T: ArrayLike, clusters_T: ArrayLike) -> Interval:
    """The interval of a ratio of two sums, Σ above / Σ below, whose terms are alike within a cluster.

    Args:
        above_T: (T,), any unit.
        below_T: (T,), such as weights; NaN where they sum to 0.
        clusters_T: (T,), the cluster of each term; n counts clusters.
    """
    above, below = np.asarray(above_T, dtype=np.float64), np.asarray(below_T, dtype=np.float64)
    names, cluster_T = np.unique(np.asarray(clusters_T), return_inverse=True)
    if not below.sum():
        return NO_INTERVAL
    ratio = float(above.sum() / below.sum())
    residual_G = np.bincount(cluster_T, weights=above - ratio * below, minlength=names.size).astype(np.float64)
    return _t_interval(ratio, _standard_error(residual_G) * names.size / float(below.sum()), names.size)


def share_interval(count: int, n: int) -> Interval:
    """A share of n independent trials with Wilson's interval, right at shares of 0 and 1 too."""
    return Interval(*_wilson(count, n), n)


def paired_difference(first_P: ArrayLike, second_P: ArrayLike) -> Difference:
    """Two policies on the same P problems, paired: what other problems would say about *these policies*.

    Args:
        first_P: (P,), the score of each problem under the first policy.
        second_P: (P,), the same problems under the second.
    """
    return difference_from(np.asarray(first_P, dtype=np.float64) - np.asarray(second_P, dtype=np.float64), 0.0)


def difference_from(values_N: ArrayLike, reference: float) -> Difference:
    """The mean of N independent values, such as one a seed, minus a fixed number.

    Args:
        values_N: (N,), any unit; NaN entries (nothing was measured) are left out.
        reference: the number, in the same unit.
    """
    values = np.asarray(values_N, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not values.size:
        return NO_DIFFERENCE
    mean = float(values.mean()) - reference
    if values.size < 2 or np.ptp(values) < _CONSTANT:
        return _constant_difference(mean, values.size, repeated=values.size > 1)
    test = stats.ttest_1samp(values - reference, 0.0)
    return _difference(mean, test, values.size)


def arm_difference(first_S: ArrayLike, second_S: ArrayLike) -> Difference:
    """Two arms by their seeds' scores: what other training runs would say about *these arms*.

    Welch's test: two runs with one seed start from the same rollouts but part after a few updates, so
    pairing would buy little and halve the degrees of freedom of a handful of seeds. What positive
    correlation is left makes Welch wider than needed, never narrower.

    Args:
        first_S: (S,), one score per seed of the first arm.
        second_S: (S',), the same for the second; n is the smaller number.
    """
    first, second = np.asarray(first_S, dtype=np.float64), np.asarray(second_S, dtype=np.float64)
    mean, n = float(first.mean() - second.mean()), min(first.size, second.size)
    if n < 2 or max(np.ptp(first), np.ptp(second)) < _CONSTANT:
        return unvaried(mean, n)
    with warnings.catch_warnings():
        # scipy warns where the seeds of one arm agree exactly; Welch's formula is right there too.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(first, second, equal_var=False)
    return _difference(mean, test, n)


def arm_contrast(scores_A: Sequence[ArrayLike], weights_A: Sequence[float]) -> Difference:
    """A weighted sum of arms' means, such as a difference of two differences, by their seeds' scores.

    Welch's test for any number of arms: the squared errors add up, with Satterthwaite's degrees of freedom. Of two arms
    with weights 1 and -1 it is `arm_difference`.

    Args:
        scores_A: for each arm (S,), one score per seed; n is the smallest number of them.
        weights_A: for each arm, not 0.
    """
    scores = [np.asarray(scores_S, dtype=np.float64) for scores_S in scores_A]
    mean = float(sum(w * s.mean() for s, w in zip(scores, weights_A, strict=True)))
    n = min(s.size for s in scores)
    if n < 2 or max(np.ptp(s) for s in scores) < _CONSTANT:
        return unvaried(mean, n)
    squares_A = np.array([w**2 * s.var(ddof=1) / s.size for s, w in zip(scores, weights_A, strict=True)])
    error = math.sqrt(squares_A.sum())
    freedom = squares_A.sum() ** 2 / sum(square**2 / (s.size - 1) for s, square in zip(scores, squares_A, strict=True))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Difference(mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, freedom)), n)


def holm(p_M: ArrayLike) -> NDArray[np.float64]:
    """Holm's adjusted p of M tests, (M,): below α each with probability at most α that any of them is wrong.

    NaN entries are tests that could not be made: they stay NaN and do not count.
    """
    p = np.asarray(p_M, dtype=np.float64)
    order = np.argsort(p)[: int((~np.isnan(p)).sum())]
    adjusted = np.full(p.size, math.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(order.size, 0, -1)), 1.0)
    return adjusted


def collapse_step(reward_N: ArrayLike, window: int) -> int | None:
    """The step at which a run's reward collapsed for good, or None where it did not.

    With m the mean reward over the last `window` steps: the first step of the stretch, up to the end of the run, in
    which m is below half of the highest m until then. A dip that ends does not count, nor one that has not lasted
    `window` steps when the run ends, nor a reward that never rose.

    Args:
        reward_N: (N,), mean reward of each step; not negative.
        window: steps of the trailing mean; the first and the last window - 1 steps cannot collapse.
    """
    reward = np.asarray(reward_N, dtype=np.float64)
    if reward.size < window:
        return None
    means = np.convolve(reward, np.full(window, 1 / window), mode="valid")
    fine = np.flatnonzero(means >= 0.5 * np.maximum.accumulate(means))
    first = int(fine[-1]) + 1
    return first + window - 1 if means.size - first >= window else None


Collapses = tuple[Sequence[int | None], Sequence[int]]
"""Of each run of an arm: the step at which it collapsed (None: it did not), and its length in steps."""


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of runs that have not collapsed, after each step at which one did; with its interval.

    Attributes:
        step_E, share_E, low_E, high_E: (E,), the Kaplan-Meier estimate and its log-log interval at E events.
        runs, collapsed: how many runs, and how many of them collapsed.
    """

    step_E: NDArray[np.float64]
    share_E: NDArray[np.float64]
    low_E: NDArray[np.float64]
    high_E: NDArray[np.float64]
    runs: int
    collapsed: int


def survival(collapse_R: Sequence[int | None], steps_R: Sequence[int]) -> Survival:
    """Kaplan and Meier's estimate from the collapse step of each of R runs (None: alive at its last step)."""
    curve = stats.ecdf(_censored(collapse_R, steps_R)).sf
    died = np.diff(curve.probabilities, prepend=1.0) < 0
    with warnings.catch_warnings():
        # The interval is not defined where all are alive or all have collapsed.
        warnings.simplefilter("ignore", RuntimeWarning)
        ends = curve.confidence_interval(CONFIDENCE, method="log-log")
    return Survival(
        np.asarray(curve.quantiles, dtype=np.float64)[died],
        np.asarray(curve.probabilities, dtype=np.float64)[died],
        np.asarray(ends.low.probabilities, dtype=np.float64)[died],
        np.asarray(ends.high.probabilities, dtype=np.float64)[died],
        len(collapse_R),
        sum(step is not None for step in collapse_R),
    )


def log_rank(sooner: Collapses, later: Collapses) -> float:
    """One-sided p of the log-rank test that `sooner` collapses no sooner than `later`; NaN where no run of either did.

    Observed minus expected collapses of an arm are the sum of its runs' scores, 1 (where the run collapsed) less Nelson
    and Aalen's cumulative hazard at its last step. If the arms are alike, every split of the runs into two arms is
    equally likely: p is the share of splits with at least that sum, of all of them where there are at most SPLITS, else
    of so many random ones. Unlike chi-square's, it holds with a handful of runs, which cannot give a small p.

    Args:
        sooner: collapse step of each run and the run's length, steps, as `survival` takes them; at least one run, and
            lengths that do not depend on the arm.
        later: likewise.
    """
    died = [step for step in (*sooner[0], *later[0]) if step is not None]
    if not died:
        return math.nan
    runs = [run for arm in (sooner, later) for run in zip(*arm, strict=True)]
    last_R = np.array([length if step is None else step for step, length in runs])
    died_R = np.array([step is not None for step, _ in runs])
    events = np.unique(died)
    hazard_E = np.cumsum([(died_R & (last_R == step)).sum() / (last_R >= step).sum() for step in events])
    score_R = died_R - np.concatenate([[0.0], hazard_E])[np.searchsorted(events, last_R, side="right")]
    size = len(sooner[0])
    least = score_R[:size].sum() - _CONSTANT
    if math.comb(len(runs), size) <= SPLITS:
        return float((score_R[list(itertools.combinations(range(len(runs)), size))].sum(axis=1) >= least).mean())
    shuffled = np.random.default_rng(0).permuted(np.tile(score_R, (SPLITS, 1)), axis=1)
    return float((1 + (shuffled[:, :size].sum(axis=1) >= least).sum()) / (1 + SPLITS))


def share_difference(first: tuple[int, int], second: tuple[int, int]) -> Interval:
    """Newcombe's interval of a difference of two shares, from Wilson's of each: right at shares of 0 and 1 too.

    Args:
        first: how many of how many; at least one of which.
        second: likewise; n is the smaller number.
    """
    (p, low, high), (q, below, above) = _wilson(*first), _wilson(*second)
    ends = math.hypot(p - low, above - q), math.hypot(high - p, q - below)
    return Interval(p - q, p - q - ends[0], p - q + ends[1], min(first[1], second[1]))


def one_sided(difference: Difference) -> tuple[float, float]:
    """p of the two one-sided tests behind a two-sided one: that the difference is above 0, and that it is below."""
    seen, other = difference.p / 2, 1 - difference.p / 2
    return (seen, other) if difference.mean > 0 else (other, seen)


def all_hold(*parts: tuple[float, float]) -> tuple[float, float]:
    """p of a claim whose parts have to hold all, and of its opposite, from those of each part: an intersection-union
    test; any one part that fails refutes it, by Bonferroni. NaN where one of a part's is."""
    holds, fails = zip(*parts, strict=True)
    return float(np.max(holds)), float(np.minimum(1.0, len(parts) * np.min(fails)))


def _wilson(count: int, n: int) -> tuple[float, float, float]:
    ends = stats.binomtest(count, n).proportion_ci(CONFIDENCE, method="wilson")
    return count / n, float(ends.low), float(ends.high)


def _censored(collapse_R: Sequence[int | None], steps_R: Sequence[int]) -> stats.CensoredData:
    """Steps survived: exact where the run collapsed, at least its length where it did not."""
    died = [step for step in collapse_R if step is not None]
    alive = [length for step, length in zip(collapse_R, steps_R, strict=True) if step is None]
    return stats.CensoredData(uncensored=died, right=alive)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(stats.sem(values)) if values.size > 1 else math.nan


def _t_interval(mean: float, standard_error: float, n: int) -> Interval:
    # Not stats.t.interval: it gives NaN, not an empty width, where the standard error is zero.
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * standard_error if n > 1 else math.nan
    return Interval(mean, mean - half, mean + half, n)


def _difference(mean: float, test: Any, n: int) -> Difference:
    interval = test.confidence_interval(CONFIDENCE)
    return Difference(mean, float(interval.low), float(interval.high), float(test.pvalue), n)


def unvaried(mean: float, n: int) -> Difference:
    """A difference of arms whose seeds agree exactly, or are one each: scores are counts, of which two agree by chance,
    and say nothing of how much others would differ. Without any difference p is 1."""
    return Difference(mean, math.nan, math.nan, 1.0 if n > 1 and abs(mean) < _CONSTANT else math.nan, n)


def _constant_difference(mean: float, n: int, *, repeated: bool) -> Difference:
    """The same difference each time, as of exact zeros: t would be 0/0 or infinite. A single one has no known error."""
    if not repeated:
        return Difference(mean, math.nan, math.nan, math.nan, n)
    return Difference(mean, mean, mean, 1.0 if abs(mean) < _CONSTANT else 0.0, n)
