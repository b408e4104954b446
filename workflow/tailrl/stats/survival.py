"""When runs collapse: the step of a collapse, Kaplan-Meier curves, and the log-rank test by permutation."""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tailrl.stats.intervals import CONFIDENCE
from tailrl.stats.tests import CONSTANT, SPLITS

RISE = 1.5
"""The factor by which the odds of a right response must have risen before a fall counts as a collapse.

It does not rule chance out. Of simulated rewards of 64 responses a step that fall evenly over 60 steps, 20 % pass it
from a start at 0.04 and 4 % from one at 0.1; over 100 steps 10 and 1 %; more where they stay level and end at once. A
start of 0.9 must rise above 0.93.
"""


def collapse_step(reward_N: ArrayLike, window: int) -> int | None:
    """The step at which a run's reward collapsed for good, or None where it did not.

    Let m be the mean reward over the last `window` steps. The collapse is the first step from which m stays below half
    of its highest value so far, until the run's end. Not counted are a dip that recovers, one shorter than `window`
    steps at the run's end, and a reward that had not risen: the odds m / (1 - m) at the highest must be more than
    RISE times those of the first `window` steps.

    Args:
        reward_N: (N,), mean reward of each step, 0 to 1.
        window: steps of the trailing mean; no collapse is possible in the first and the last window - 1 steps.
    """
    reward = np.asarray(reward_N, dtype=np.float64)
    if reward.size < window:
        return None
    means = np.convolve(reward, np.full(window, 1 / window), mode="valid")
    fine = np.flatnonzero(means >= 0.5 * np.maximum.accumulate(means))
    first = int(fine[-1]) + 1
    start, best = means[0], means.max()
    risen = best * (1 - start) > RISE * start * (1 - best)  # of the odds, which are infinite at a reward of 1
    return first + window - 1 if risen and means.size - first >= window else None


class Collapses(NamedTuple):
    """When the runs of an arm collapsed.

    Attributes:
        steps: the step of each run's collapse, from 1; None without one.
        lengths: each run's number of steps.
    """

    steps: Sequence[int | None]
    lengths: Sequence[int]

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self.steps)

    @property
    def collapsed(self) -> int:
        """How many of them collapsed."""
        return sum(step is not None for step in self.steps)

    @property
    def lasted(self) -> NDArray[np.float64]:
        """Each run's steps before its collapse, (N,); all of its steps without a collapse."""
        return np.array([float(step or length) for step, length in zip(self.steps, self.lengths, strict=True)])


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of runs that have not collapsed, after each step with a collapse.

    Attributes:
        step_E, share_E, low_E, high_E: (E,), the Kaplan-Meier estimate and its log-log interval at E events.
        runs, collapsed: the number of runs, and of collapsed runs.
    """

    step_E: NDArray[np.float64]
    share_E: NDArray[np.float64]
    low_E: NDArray[np.float64]
    high_E: NDArray[np.float64]
    runs: int
    collapsed: int


def survival(collapse_R: Sequence[int | None], steps_R: Sequence[int]) -> Survival:
    """Kaplan and Meier's estimate from R runs' collapse steps (None: censored at its length) and lengths, in steps."""
    collapsed = [step for step in collapse_R if step is not None]
    alive = [length for step, length in zip(collapse_R, steps_R, strict=True) if step is None]
    curve = stats.ecdf(stats.CensoredData(uncensored=collapsed, right=alive)).sf
    died = np.diff(curve.probabilities, prepend=1.0) < 0
    with warnings.catch_warnings():
        # The interval is not defined where no run or every run has collapsed.
        warnings.simplefilter("ignore", RuntimeWarning)
        ends = curve.confidence_interval(CONFIDENCE, method="log-log")
    return Survival(
        np.asarray(curve.quantiles, dtype=np.float64)[died],
        np.asarray(curve.probabilities, dtype=np.float64)[died],
        np.asarray(ends.low.probabilities, dtype=np.float64)[died],
        np.asarray(ends.high.probabilities, dtype=np.float64)[died],
        len(collapse_R),
        len(collapsed),
    )


def log_rank(sooner: Collapses, later: Collapses) -> float:
    """One-sided p of the log-rank test with the null hypothesis that `sooner` collapses no sooner than `later`.

    An arm's observed minus expected collapses are the sum of its runs' scores. A score is 1 if the run collapsed, else
    0, minus Nelson and Aalen's cumulative hazard at its last step. Under the null hypothesis every split of the runs
    into two arms is equally likely. p is the share of splits with at least the observed sum: of all splits if there are
    at most SPLITS, else of SPLITS random ones. Unlike the chi-square test, this holds with few runs, whose p is never
    small. scipy's `permutation_test` rejects an arm of one run, and its random splits differ from the published ones.

    The first arm has at least one run. Lengths must not depend on the arm. p is NaN if no run of either arm collapsed.
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
    least = score_R[:size].sum() - CONSTANT
    if math.comb(len(runs), size) <= SPLITS:
        return float((score_R[list(itertools.combinations(range(len(runs)), size))].sum(axis=1) >= least).mean())
    shuffled = np.random.default_rng(0).permuted(np.tile(score_R, (SPLITS, 1)), axis=1)
    return float((1 + (shuffled[:, :size].sum(axis=1) >= least).sum()) / (1 + SPLITS))
