"""When runs collapse: each arm's share of runs that have not, over the steps, as rows and as a figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from tailrl.report.axes import arm_legend, arm_styles, make_panels, say_nothing_to_show, set_percent_axis, style
from tailrl.report.data import STEP, FloatArray, Results, TrainedRun
from tailrl.report.statistics import Collapses, collapse_step, survival

REWARD = "reward/mean"

WINDOW, FEWEST = 0.1, 5
"""The reward of a run at a step is its mean over the last tenth of the run's steps, and over 5 at least."""


def collapses(runs: Sequence[TrainedRun]) -> Collapses:
    """Of each run of an arm that recorded a reward: the step at which it collapsed, from 1, or None; and its length."""
    steps, lengths = [], []
    for run in runs:
        reward_N = run.metric(REWARD)
        if not np.isnan(reward_N).all():
            place = collapse_of(reward_N)
            steps.append(None if place is None else int(run.metrics[STEP][place]) + 1)
            lengths.append(int(run.metrics[STEP][-1]) + 1)
    return steps, lengths


def lasted(found: Collapses) -> FloatArray:
    """The steps of each run before its collapse, (N,); all that it took where there was none."""
    return np.array([float(step or length) for step, length in zip(*found, strict=True)])


def collapse_of(reward_N: FloatArray) -> int | None:
    """The place, from 0, at which rewards (NaN where none was recorded) collapsed for good; None where they did not."""
    place_M = np.flatnonzero(~np.isnan(reward_N))
    index = collapse_step(reward_N[place_M], _window(place_M.size))
    return None if index is None else int(place_M[index])


def deepest_loss(runs: Sequence[TrainedRun]) -> float:
    """The largest share of its best reward that a run lacks at its end, 0 to 1; NaN where none is long enough."""
    losses = [math.nan]
    for run in runs:
        reward_N = run.metric(REWARD)
        reward_N = reward_N[~np.isnan(reward_N)]
        window = _window(reward_N.size)
        if reward_N.size >= window:
            means = np.convolve(reward_N, np.full(window, 1 / window), mode="valid")
            losses.append(1 - float(means[-1] / means.max()) if means.max() > 0 else 0.0)
    return float(np.fmax.reduce(losses))


@dataclass(frozen=True, slots=True)
class Surviving:
    """The share of an arm's runs that have not collapsed after a step, with its interval (NaN where there is none)."""

    arm: str
    step: int
    share: float
    low: float
    high: float
    runs: int
    collapsed: int


def survival_curve(arm: str, runs: Sequence[TrainedRun]) -> list[Surviving]:
    """Kaplan and Meier's estimate for an arm: at step 0, and at each step at which a run of it collapsed."""
    steps, lengths = collapses(runs)
    counts = len(steps), sum(step is not None for step in steps)
    rows = [Surviving(arm, 0, 1.0 if steps else math.nan, math.nan, math.nan, *counts)]
    if counts[1]:
        curve = survival(steps, lengths)
        for step, share, low, high in zip(curve.step_E, curve.share_E, curve.low_E, curve.high_E, strict=True):
            rows.append(Surviving(arm, int(step), float(share), float(low), float(high), *counts))
    return rows


def survival_figure(results: Results) -> Figure:
    """Every arm's curve with its band; a sentence instead where no run collapsed."""
    curves = {arm: survival_curve(arm, results.runs[arm]) for arm in results.arms}
    collapsed = any(curve[0].collapsed for curve in curves.values())
    with style():
        figure, (ax,) = make_panels(1, 1, 2.6 if collapsed else 1.2)
        if not collapsed:
            say_nothing_to_show(ax, "No run of this study collapsed.")
            return figure
        for arm, (colour, dash) in arm_styles(results.arms).items():
            end = max(collapses(results.runs[arm])[1], default=0)
            drawn = [*curves[arm], replace(curves[arm][-1], step=end)]
            step = [row.step for row in drawn]
            ax.step(step, [row.share for row in drawn], where="post", color=colour, linestyle=dash)
            band = [row.low for row in drawn], [row.high for row in drawn]
            ax.fill_between(step, *band, step="post", color=colour, alpha=0.15, linewidth=0)
        ax.set_ylim(-0.03, 1.03)
        set_percent_axis(ax, axis="y")
        ax.set_xlabel("training step")
        ax.set_ylabel("runs not collapsed")
        arm_legend(figure, results.arms)
        return figure


def _window(steps: int) -> int:
    return max(FEWEST, math.ceil(WINDOW * steps))
