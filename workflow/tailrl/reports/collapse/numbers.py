"""When runs collapse: each arm's share of runs that have not collapsed, over the steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrl.artifacts.metrics import FloatArray, Metrics
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.stats.survival import Collapses, collapse_step, survival
from tailrl.tracking.metrics import CURRICULUM_LEVEL, REWARD, STEP

WINDOW_SHARE, FEWEST_STEPS = 0.1, 5
"""The window of the mean reward: this share of the run's steps, and at least this many steps."""


def tells_collapse(metrics: Metrics) -> bool:
    """Whether a run's rewards are of one task. Under a curriculum problems become harder as the reward rises.

    Its rewards then neither rise far nor stay low. So they cannot tell a collapse.
    """
    return CURRICULUM_LEVEL not in metrics


def collapses(runs: Sequence[TrainedRun]) -> Collapses:
    """The step of each run's collapse, from 1, or None; and each run's length.

    Runs without a reward are left out, and runs whose problems become harder (`tells_collapse`).
    """
    steps, lengths = [], []
    for run in runs:
        reward_N = run.metric(REWARD)
        if tells_collapse(run.metrics) and not np.isnan(reward_N).all():
            place = collapse_of(reward_N)
            steps.append(None if place is None else int(run.metrics[STEP][place]) + 1)
            lengths.append(int(run.metrics[STEP][-1]) + 1)
    return Collapses(steps, lengths)


def collapse_of(reward_N: FloatArray) -> int | None:
    """The index at which rewards (NaN where not recorded) collapsed for good; None without a collapse."""
    place_M = np.flatnonzero(~np.isnan(reward_N))
    index = collapse_step(reward_N[place_M], _window(place_M.size))
    return None if index is None else int(place_M[index])


def deepest_loss(runs: Sequence[TrainedRun]) -> float:
    """The largest loss among runs, as a share of a run's best reward at its end, 0 to 1; NaN if all are too short."""
    losses = [math.nan]
    for run in runs:
        best, end = best_and_end(run)
        if not math.isnan(best):
            losses.append(1 - end / best if best > 0 else 0.0)
    return float(np.fmax.reduce(losses))


def best_and_end(run: TrainedRun) -> tuple[float, float]:
    """The largest and the last mean reward over a window of steps, 0 to 1; NaN if the run is too short."""
    reward_N = run.metric(REWARD)
    reward_N = reward_N[~np.isnan(reward_N)]
    window = _window(reward_N.size)
    if reward_N.size < window:
        return math.nan, math.nan
    means = np.convolve(reward_N, np.full(window, 1 / window), mode="valid")
    return float(means.max()), float(means[-1])


@dataclass(frozen=True, slots=True)
class RunCollapse:
    """When a run collapsed, and how far its reward fell.

    Attributes:
        steps: of the run.
        collapse: the step of its collapse, from 1; NaN without one, or if it cannot be told.
        best, end: the largest and the last mean reward over a window of steps, 0 to 1.
    """

    arm: str
    seed: int
    steps: int
    collapse: float
    best: float
    end: float


def run_collapses(results: Results) -> Iterator[RunCollapse]:
    """A record for each run, arm by arm."""
    for run in results.all_runs():
        found = collapses([run])
        step = next((float(step) for step in found.steps if step is not None), math.nan)
        best, end = best_and_end(run)
        yield RunCollapse(run.arm, run.seed, int(run.metrics[STEP][-1]) + 1, step, best, end)


@dataclass(frozen=True, slots=True)
class Surviving:
    """The share of an arm's runs that have not collapsed after a step, with its interval (NaN if undefined)."""

    arm: str
    step: int
    share: float
    low: float
    high: float
    runs: int
    collapsed: int


def survival_curve(arm: str, runs: Sequence[TrainedRun]) -> list[Surviving]:
    """Kaplan and Meier's estimate for an arm: at step 0, and at each step at which a run collapsed."""
    found = collapses(runs)
    counts = found.runs, found.collapsed
    rows = [Surviving(arm, 0, 1.0 if found.runs else math.nan, math.nan, math.nan, *counts)]
    if found.collapsed:
        curve = survival(*found)
        for step, share, low, high in zip(curve.step_E, curve.share_E, curve.low_E, curve.high_E, strict=True):
            rows.append(Surviving(arm, int(step), float(share), float(low), float(high), *counts))
    return rows


def _window(steps: int) -> int:
    return max(FEWEST_STEPS, math.ceil(WINDOW_SHARE * steps))
