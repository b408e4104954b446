"""Shares, medians and a permutation test for runs that are clustered in arms.

Whether a run collapses or raises an alarm depends mostly on its arm. Three runs of one arm say little more than one.
So arms are the units: intervals allow for clustering by arm, and the test permutes arms.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tailrl.stats.intervals import NO_INTERVAL, UPPER, Interval, cluster_interval
from tailrl.stats.tests import SPLITS


def clustered_share(hit_R: ArrayLike, arm_R: ArrayLike) -> Interval:
    """A share of R runs clustered in arms, with Korn and Graubard's interval.

    This is Clopper and Pearson's interval with the effective number of runs in place of R (`_effective_runs`). With one
    run in each arm, both intervals agree. Where a single arm has all hits, the interval is wider than necessary.

    Source: Korn and Graubard, Survey Methodology 24 (1998), 193-201.

    hit_R is 0 or 1, (R,), and arm_R each run's arm, (R,), numbers or strings; n counts arms.
    """
    hit, arm = np.asarray(hit_R, dtype=np.float64), np.asarray(arm_R)
    if not hit.size:
        return NO_INTERVAL
    share, size = float(hit.mean()), _effective_runs(hit, arm)
    low = 1 - float(_highest(np.array(1 - share), size))
    return Interval(share, low, float(_highest(np.array(share), size)), np.unique(arm).size)


def clustered_median(values_R: ArrayLike, arm_R: ArrayLike) -> Interval:
    """The median of R runs clustered in arms, with Woodruff's interval.

    The interval inverts that of a share. It contains each value beyond which the share of runs could still be a half,
    given the effective number of runs at the median. Each value has its own test, as in Francisco and Fuller. With one
    run in each arm, this is the interval of order statistics, which holds with few runs too.

    Source: Woodruff, JASA 47 (1952), 635-646; Francisco and Fuller, Annals of Statistics 19 (1991), 454-469.

    Values are (R,), in any unit; arm_R as in `clustered_share`. Five independent runs or fewer give no interval (NaN).
    """
    values, arm = np.asarray(values_R, dtype=np.float64), np.asarray(arm_R)
    if not values.size:
        return NO_INTERVAL
    median, ordered = float(np.median(values)), np.sort(values)
    size = _effective_runs((values <= median).astype(np.float64), arm)
    below = np.arange((values.size + 1) // 2) / values.size
    cut = int((_highest(below, size) <= 0.5).sum())
    ends = (ordered[cut - 1], ordered[-cut]) if cut else (math.nan, math.nan)
    return Interval(median, float(ends[0]), float(ends[1]), np.unique(arm).size)


def shuffled_skill(
    alarm_FR: ArrayLike, collapse_R: ArrayLike, chooses_R: ArrayLike, arm_R: Sequence[Hashable],
    place_R: Sequence[Hashable],
) -> float:  # fmt: skip
    """One-sided p of the null hypothesis that an arm's alarms announce its collapses no better than another arm's.

    The statistic is Youden's skill: sensitivity less the share of false alarms. The threshold with most skill on the
    runs that choose is judged on the remaining runs. Each shuffle permutes arms. An arm's alarms, by all thresholds,
    move together to another arm with runs at the same places; an arm without such a partner keeps its own. Each shuffle
    also chooses its threshold again. Both halves have runs of the same arms, so a test of the chosen threshold alone
    would detect the choice itself. A shuffle where no threshold has skill on the runs that choose counts as no skill.

    Args:
        alarm_FR: (F, R), the step of each run's alarm by each of F thresholds, infinite without an alarm. Among
            thresholds with the same skill the first is chosen.
        collapse_R: (R,), the step of each run's collapse, infinite without one.
        chooses_R: bool (R,), the runs on which the threshold is chosen.
        arm_R: (R,), the arm of each run.
        place_R: (R,), a run's place in its arm, such as its study, planned steps and seed; unique within an arm.

    Returns:
        The share with at least the observed skill, among SPLITS shuffles (of a fixed seed) and the observation itself.
        NaN where no threshold has skill on the runs that choose, or where all or none of either half collapsed.
    """
    alarms, collapse = np.asarray(alarm_FR, dtype=np.float64), np.asarray(collapse_R, dtype=np.float64)
    chooses = np.asarray(chooses_R, dtype=bool)
    # Skill times both numbers of runs is a whole number, so equal skills tie exactly. Without a collapse, its step is
    # infinite: every alarm is then earlier, and counts as false.
    weight_HR = np.array([_skill_weights(np.isfinite(collapse), half_R) for half_R in (chooses, ~chooses)])
    if not weight_HR.any(axis=1).all():
        return math.nan
    rng = np.random.default_rng(0)
    from_BR = np.tile(np.arange(collapse.size), (1 + SPLITS, 1))  # the observation comes first
    for runs_AS in _exchangeable(arm_R, place_R):
        order_BA = rng.permuted(np.tile(np.arange(len(runs_AS)), (SPLITS, 1)), axis=1)
        from_BR[1:, runs_AS.ravel()] = runs_AS[order_BA].reshape(SPLITS, -1)
    skill_FBH = np.stack([(alarm_R[from_BR] < collapse) @ weight_HR.T for alarm_R in alarms])
    chosen_BH = skill_FBH[skill_FBH[:, :, 0].argmax(axis=0), np.arange(1 + SPLITS)]
    if chosen_BH[0, 0] <= 0:
        return math.nan
    return float(((chosen_BH[:, 0] > 0) & (chosen_BH[:, 1] >= chosen_BH[0, 1])).mean())


def _skill_weights(collapsed_R: NDArray[np.bool_], half_R: NDArray[np.bool_]) -> NDArray[np.int64]:
    """What each run's alarm adds to the skill of one half, times its numbers of collapsed and other runs."""
    fell, stood = int((half_R & collapsed_R).sum()), int((half_R & ~collapsed_R).sum())
    return np.where(half_R, np.where(collapsed_R, stood, -fell), 0) if fell and stood else np.zeros(half_R.size, int)


def _exchangeable(arm_R: Sequence[Hashable], place_R: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """For each set of arms with runs at the same places: those runs, (A, S)."""
    arms: dict[Hashable, dict[Hashable, int]] = {}
    for run, (arm, place) in enumerate(zip(arm_R, place_R, strict=True)):
        arms.setdefault(arm, {})[place] = run
    sets: dict[frozenset[Hashable], list[dict[Hashable, int]]] = {}
    for runs in arms.values():
        sets.setdefault(frozenset(runs), []).append(runs)
    return [np.array([[runs[place] for place in like[0]] for runs in like]) for like in sets.values()]


def _effective_runs(hit_R: NDArray[np.float64], arm_R: NDArray[np.generic]) -> float:
    """The number of independent runs with the same variance of a share as these clustered runs, at most R.

    R is divided by the design effect: the variance over arms as a multiple of that over independent runs. It is also
    multiplied by the squared ratio of t's quantiles, with R - 1 and with (arms - 1) degrees of freedom. This accounts
    for estimating the variance from few arms. The design effect is unknown where fewer than two arms have a hit, or
    fewer than two a miss. The number of arms then stands in, which is conservative: each arm counts as one run.
    """
    share, arms, runs = float(hit_R.mean()), np.unique(arm_R).size, hit_R.size
    if min(np.unique(arm_R[hit_R == kind]).size for kind in (0, 1)) < 2:
        return arms
    interval = cluster_interval(hit_R, arm_R)
    half = (interval.high - interval.low) / 2  # t with arms - 1 degrees of freedom times the standard error
    if not half:
        return runs
    alone = float(stats.t.ppf(UPPER, runs - 1)) * math.sqrt(share * (1 - share) / (runs - 1))
    return min(runs, runs * (alone / half) ** 2)


def _highest(share_M: NDArray[np.float64], size: float) -> NDArray[np.float64]:
    """The upper end of Clopper and Pearson's interval of shares of `size` runs, which need not be a whole number."""
    hits_M = share_M * size
    # At a share of 1 the beta distribution's second parameter is 0, where it is not defined.
    return np.where(share_M < 1, stats.beta.ppf(UPPER, hits_M + 1, size - hits_M), 1.0)
