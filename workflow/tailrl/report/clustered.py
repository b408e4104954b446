"""Shares, medians and a test for runs that are alike within an arm; scipy has the distributions.

Whether an arm's runs collapse, and whether they raise an alarm, is mostly the arm's doing: three runs of one arm say
little more than one. So arms are what an interval is over here, and what a test shuffles.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tailrl.report.statistics import CONFIDENCE, SPLITS, Interval, cluster_interval

_UPPER = (1 + CONFIDENCE) / 2


def clustered_share(hit_R: ArrayLike, arm_R: ArrayLike) -> Interval:
    """A share of R runs that are alike within an arm, with Korn and Graubard's interval.

    It is Clopper and Pearson's with the effective number of runs in place of R: the number of independent ones that
    would leave as much variance, less what it costs to estimate that variance from a few arms. Where each arm has one
    run, it is theirs. Of rare hits it is approximate: of a share of 0.1, in 25 arms of 1 to 5 runs that are nearly one
    and the same, it holds the truth 94 times in 100.

    Source: Korn and Graubard, Survey Methodology 24 (1998), 193-201.

    Args:
        hit_R: (R,), 0 or 1.
        arm_R: (R,), numbers or strings, the arm of each run; n counts arms.
    """
    hit, arm = np.asarray(hit_R, dtype=np.float64), np.asarray(arm_R)
    if not hit.size:
        return Interval(math.nan, math.nan, math.nan, 0)
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
        return Interval(math.nan, math.nan, math.nan, 0)
    median, ordered = float(np.median(values)), np.sort(values)
    size = _effective_runs((values <= median).astype(np.float64), arm)
    below = np.arange((values.size + 1) // 2) / values.size
    cut = int((_highest(below, size) <= 0.5).sum())
    ends = (ordered[cut - 1], ordered[-cut]) if cut else (math.nan, math.nan)
    return Interval(median, float(ends[0]), float(ends[1]), np.unique(arm).size)


def shuffled_skill(
    alarm_R: ArrayLike, collapse_R: ArrayLike, arm_R: Sequence[Hashable], seed_R: Sequence[int],
    block_R: Sequence[Hashable],
) -> float:  # fmt: skip
    """One-sided p that alarms announce collapses no better than those of any other arm would.

    A permutation test of Youden's skill, the share of collapsed runs with an alarm before less that of the others with
    an alarm. If alarms know nothing of an arm's collapses, an arm could as well have had those of any other arm of its
    block: all of an arm's alarms move at once, seed by seed, and each is held anew against the collapse, or its
    absence, of the run that it comes to. Arms change places with those that have the same seeds; one whose seeds no
    other has keeps its alarms. p is the share of SPLITS random shuffles, always the same, and of what was seen, with at
    least the skill that was seen; NaN where no run collapsed or every one did.

    Args:
        alarm_R: (R,), the step of each run's alarm; infinite without one.
        collapse_R: (R,), that of its collapse, likewise.
        arm_R: (R,), its arm, a name within the block.
        seed_R: (R,), its seed.
        block_R: (R,), the arms that could have changed places with its own, such as those of its study.
    """
    alarm, collapse = np.asarray(alarm_R, dtype=np.float64), np.asarray(collapse_R, dtype=np.float64)
    collapsed = np.isfinite(collapse)
    fell = int(collapsed.sum())
    if fell in (0, collapse.size):
        return math.nan
    # Skill times both numbers of runs: whole numbers, so that shuffles with the same skill tie. An alarm before no
    # collapse is a false one, and both are earlier than a step that may be infinite.
    weight_R = np.where(collapsed, collapse.size - fell, -fell)
    rng = np.random.default_rng(0)
    from_BR = np.tile(np.arange(collapse.size), (SPLITS, 1))
    for runs_AS in _exchangeable(arm_R, seed_R, block_R):
        order_BA = rng.permuted(np.tile(np.arange(len(runs_AS)), (SPLITS, 1)), axis=1)
        from_BR[:, runs_AS.ravel()] = runs_AS[order_BA].reshape(SPLITS, -1)
    skill_B = (alarm[from_BR] < collapse) @ weight_R
    return float((1 + (skill_B >= (alarm < collapse) @ weight_R).sum()) / (1 + SPLITS))


def _exchangeable(
    arm_R: Sequence[Hashable], seed_R: Sequence[int], block_R: Sequence[Hashable]
) -> list[NDArray[np.int64]]:
    """The places of the runs of arms that can change places, (A, S) for each such set of arms."""
    arms: dict[tuple[Hashable, Hashable], list[int]] = {}
    for place in sorted(range(len(seed_R)), key=lambda place: seed_R[place]):
        arms.setdefault((block_R[place], arm_R[place]), []).append(place)
    sets: dict[tuple[Hashable, tuple[int, ...]], list[list[int]]] = {}
    for (block, _), places in arms.items():
        sets.setdefault((block, tuple(seed_R[place] for place in places)), []).append(places)
    return [np.array(runs_AS) for runs_AS in sets.values()]


def _effective_runs(hit_R: NDArray[np.float64], arm_R: NDArray[np.generic]) -> float:
    """The number of independent runs that a share of clustered ones is worth, at most R.

    R over the design effect, the variance over arms as a multiple of that over independent runs, times the square of
    t's quantile with R - 1 degrees of freedom over that with one fewer than there are arms. A share of 0 or 1 has no
    variance to estimate, and a single arm none between arms: it is then the number of arms, as if the runs of each were
    one and the same, which can only be too few.
    """
    share, arms, runs = float(hit_R.mean()), np.unique(arm_R).size, hit_R.size
    if arms == 1 or share in (0.0, 1.0):
        return arms
    interval = cluster_interval(hit_R, arm_R)
    half = (interval.high - interval.low) / 2  # t with arms - 1 degrees of freedom times the standard error
    if not half:
        return runs
    alone = float(stats.t.ppf(_UPPER, runs - 1)) * math.sqrt(share * (1 - share) / (runs - 1))
    return min(runs, runs * (alone / half) ** 2)


def _highest(share_M: NDArray[np.float64], size: float) -> NDArray[np.float64]:
    """The upper end of Clopper and Pearson's interval of shares of so many runs, which need not be a whole number."""
    hits_M = share_M * size
    # Of a share of 1 the beta distribution has no second parameter.
    return np.where(share_M < 1, stats.beta.ppf(_UPPER, hits_M + 1, size - hits_M), 1.0)
