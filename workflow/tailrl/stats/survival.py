"""When runs collapse: steps of a collapse, Kaplan-Meier curves, and the log-rank test by permutation."""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from tailrl.stats.intervals import CONFIDENCE
from tailrl.stats.tests import CONSTANT, SPLITS


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

    Not scipy's `permutation_test`: it refuses an arm of one run, and its other random splits would move the published p
    of arms with ten runs.

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
    least = score_R[:size].sum() - CONSTANT
    if math.comb(len(runs), size) <= SPLITS:
        return float((score_R[list(itertools.combinations(range(len(runs)), size))].sum(axis=1) >= least).mean())
    shuffled = np.random.default_rng(0).permuted(np.tile(score_R, (SPLITS, 1)), axis=1)
    return float((1 + (shuffled[:, :size].sum(axis=1) >= least).sum()) / (1 + SPLITS))


def _censored(collapse_R: Sequence[int | None], steps_R: Sequence[int]) -> stats.CensoredData:
    """Steps survived: exact where the run collapsed, at least its length where it did not."""
    died = [step for step in collapse_R if step is not None]
    alive = [length for step, length in zip(collapse_R, steps_R, strict=True) if step is None]
    return stats.CensoredData(uncensored=died, right=alive)
