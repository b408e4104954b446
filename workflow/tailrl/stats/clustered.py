"""Shares, medians and a test for runs that are alike within an arm; scipy has the distributions.

Whether an arm's runs collapse, and whether they raise an alarm, is mostly the arm's doing: three runs of one arm say
little more than one. So arms are what an interval is over here, and what a test shuffles.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tailrl.stats.intervals import NO_INTERVAL, UPPER, Interval, cluster_interval
from tailrl.stats.tests import SPLITS


def clustered_share(hit_R: ArrayLike, arm_R: ArrayLike) -> Interval:
    """A share of R runs that are alike within an arm, with Korn and Graubard's interval.

    It is Clopper and Pearson's with the effective number of runs in place of R: the number of independent ones that
    would leave as much variance, less what it costs to estimate that variance from a few arms. Where each arm has one
    run, it is theirs. Where hits are so rare that one arm alone has them it is wider than it has to be.

    Source: Korn and Graubard, Survey Methodology 24 (1998), 193-201.

    Args:
        hit_R: (R,), 0 or 1.
        arm_R: (R,), numbers or strings, the arm of each run; n counts arms.
    """
    hit, arm = np.asarray(hit_R, dtype=np.float64), np.asarray(arm_R)
    if not hit.size:
        return NO_INTERVAL
    share, size = float(hit.mean()), _effective_runs(hit, arm)
    low = 1 - float(_highest(np.array(1 - share), size))
    return Interval(share, low, float(_highest(np.array(share), size)), np.unique(arm).size)


def clustered_median(values_R: ArrayLike, arm_R: ArrayLike) -> Interval:
    """The median of the values of R runs that are alike within an arm, with Woodruff's interval.

    The interval of a share, with the effective number of runs at the median, is turned into one of values: it goes from
    the least value to the largest one at which the share beyond it could still be a half. That is asked at each value,
    as Francisco and Fuller do, and not of the half alone: where each arm has one run, it is the interval of order
    statistics then, and holds with few runs too.

    Source: Woodruff, JASA 47 (1952), 635-646; Francisco and Fuller, Annals of Statistics 19 (1991), 454-469.

    Args:
        values_R: (R,), any unit; too few independent ones give no interval (NaN), such as five at 95 %.
        arm_R: (R,), numbers or strings, the arm of each run; n counts arms.
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
    """One-sided p that alarms announce collapses no better than those of any other arm would.

    A permutation test of Youden's skill, the share of collapsed runs with an alarm before less that of the others with
    an alarm, of the threshold that has most of it on the runs that choose, judged on the rest. If alarms know nothing
    of an arm's collapses, an arm could as well have had those of another: all of an arm's alarms, by every threshold,
    move at once, run by run, and each is held anew against the collapse, or its absence, of the run that it comes to.
    Then a threshold is chosen anew, for both halves have runs of the same arms, and a test of the chosen one alone
    would find its choice. A shuffle in which none has skill where it is chosen has none that is judged. Arms change
    places with those that have runs at the same places; one whose places no other has keeps its alarms.

    Args:
        alarm_FR: (F, R), the step of each run's alarm by each of F thresholds, infinite without one. Of thresholds with
            the same skill the first is chosen.
        collapse_R: (R,), the step of each run's collapse, likewise.
        chooses_R: bool (R,), the runs on which the threshold is chosen.
        arm_R: (R,), the arm of each run.
        place_R: (R,), where in its arm a run stands, such as its study, planned steps and seed; of an arm all differ.

    Returns:
        The share, of SPLITS random shuffles, always the same, and what was seen, with at least the skill that was seen.
        NaN where no threshold has skill on the runs that choose, or where all or none of either half collapsed.
    """
    alarms, collapse = np.asarray(alarm_FR, dtype=np.float64), np.asarray(collapse_R, dtype=np.float64)
    chooses = np.asarray(chooses_R, dtype=bool)
    # Skill times both numbers of runs: whole numbers, so that thresholds and shuffles with the same skill tie. An alarm
    # before no collapse is a false one, and both are earlier than a step that may be infinite.
    weight_HR = np.array([_skill_weights(np.isfinite(collapse), half_R) for half_R in (chooses, ~chooses)])
    if not weight_HR.any(axis=1).all():
        return math.nan
    rng = np.random.default_rng(0)
    from_BR = np.tile(np.arange(collapse.size), (1 + SPLITS, 1))  # what was seen comes first
    for runs_AS in _exchangeable(arm_R, place_R):
        order_BA = rng.permuted(np.tile(np.arange(len(runs_AS)), (SPLITS, 1)), axis=1)
        from_BR[1:, runs_AS.ravel()] = runs_AS[order_BA].reshape(SPLITS, -1)
    skill_FBH = np.stack([(alarm_R[from_BR] < collapse) @ weight_HR.T for alarm_R in alarms])
    chosen_BH = skill_FBH[skill_FBH[:, :, 0].argmax(axis=0), np.arange(1 + SPLITS)]
    if chosen_BH[0, 0] <= 0:
        return math.nan
    return float(((chosen_BH[:, 0] > 0) & (chosen_BH[:, 1] >= chosen_BH[0, 1])).mean())


def _skill_weights(collapsed_R: NDArray[np.bool_], half_R: NDArray[np.bool_]) -> NDArray[np.int64]:
    """What an early alarm of each run adds to the skill on some of the runs, times their numbers of both kinds."""
    fell, stood = int((half_R & collapsed_R).sum()), int((half_R & ~collapsed_R).sum())
    return np.where(half_R, np.where(collapsed_R, stood, -fell), 0) if fell and stood else np.zeros(half_R.size, int)


def _exchangeable(arm_R: Sequence[Hashable], place_R: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """The runs of arms that can change places, (A, S) for each such set of arms."""
    arms: dict[Hashable, dict[Hashable, int]] = {}
    for run, (arm, place) in enumerate(zip(arm_R, place_R, strict=True)):
        arms.setdefault(arm, {})[place] = run
    sets: dict[frozenset[Hashable], list[dict[Hashable, int]]] = {}
    for runs in arms.values():
        sets.setdefault(frozenset(runs), []).append(runs)
    return [np.array([[runs[place] for place in like[0]] for runs in like]) for like in sets.values()]


def _effective_runs(hit_R: NDArray[np.float64], arm_R: NDArray[np.generic]) -> float:
    """The number of independent runs that a share of clustered ones is worth, at most R.

    R over the design effect, the variance over arms as a multiple of that over independent runs, times the square of
    t's quantile with R - 1 degrees of freedom over that with one fewer than there are arms. Where at most one arm has a
    hit, or at most one a miss, it does not show whether runs of an arm are alike: it is then the number of arms, as if
    the runs of each were one and the same, which can only be too few.
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
    """The upper end of Clopper and Pearson's interval of shares of so many runs, which need not be a whole number."""
    hits_M = share_M * size
    # Of a share of 1 the beta distribution has no second parameter.
    return np.where(share_M < 1, stats.beta.ppf(UPPER, hits_M + 1, size - hits_M), 1.0)
