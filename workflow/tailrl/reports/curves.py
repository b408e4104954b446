"""Metrics over the steps of an arm's runs: mean and range over seeds, as rows of a table and as lines of a figure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.artifacts.tables import Row
from tailrl.reports.axes import Dash, arm_styles, say_in_the_middle, set_magnitude_scale, set_marks
from tailrl.stats.intervals import known_mean
from tailrl.tracking.metrics import GRADIENT_NORM, K3_MASKED, K3_UNMASKED, STEP, WEIGHT_RAW

SMOOTHING = 0.05
"""The window of a training curve's moving mean, as a share of the steps."""

MAGNITUDES = (GRADIENT_NORM, K3_MASKED, K3_UNMASKED, WEIGHT_RAW)
"""Metrics that span decades: log axes."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one arm over the steps: mean, minimum and maximum over seeds.

    Attributes:
        step_N: int, 0-based; the union of the seeds' steps.
        mean_N, low_N, high_N: float64, NaN where no seed has a value.
        window: steps of the centred moving mean, applied to each seed first; 1 for none.
    """

    arm: str
    metric: str
    step_N: NDArray[np.int64]
    mean_N: FloatArray
    low_N: FloatArray
    high_N: FloatArray
    window: int

    def rows(self) -> Iterator[Row]:
        """One CSV row per step."""
        for step, mean, low, high in zip(self.step_N, self.mean_N, self.low_N, self.high_N, strict=True):
            named = {"arm": self.arm, "metric": self.metric, "step": int(step)}
            yield {**named, "mean": mean, "seed_min": low, "seed_max": high, "window": self.window}


def moving_mean(values_N: FloatArray, window: int) -> FloatArray:
    """The centred mean over `window` (odd) steps; shorter at the ends, without NaN entries."""
    known = ~np.isnan(values_N)
    kernel, half = np.ones(window), window // 2
    total = np.convolve(np.where(known, values_N, 0.0), kernel)[half : half + values_N.size]
    count = np.convolve(known.astype(np.float64), kernel)[half : half + values_N.size]
    with np.errstate(invalid="ignore"):
        return np.where(known, total / count, math.nan)


def window_of(runs: Sequence[TrainedRun]) -> int:
    """The odd number of steps nearest to SMOOTHING of the longest run, at least 1."""
    steps = max(len(run.metrics[STEP]) for run in runs)
    return 2 * int(SMOOTHING * steps / 2) + 1


def curve(runs: Sequence[TrainedRun], key: str, *, window: int = 1, lost: bool = False) -> Curve:
    """One metric of one arm's runs over the steps.

    Args:
        runs: one arm's runs, one per seed.
        key: the metric; NaN for a seed without it.
        window: odd number of steps of the moving mean.
        lost: take 1 minus the metric, such as the mass outside for a kept mass.
    """
    step_N = np.unique(np.concatenate([run.metric(STEP) for run in runs]))
    value_SN = np.full((len(runs), step_N.size), math.nan)
    for row, run in zip(value_SN, runs, strict=True):
        values = run.metric(key)
        row[np.searchsorted(step_N, run.metric(STEP))] = moving_mean(1.0 - values if lost else values, window)
    known_N = ~np.isnan(value_SN).all(axis=0)
    mean_N, low_N, high_N = np.full((3, step_N.size), math.nan)
    mean_N[known_N] = np.nanmean(value_SN[:, known_N], axis=0)
    low_N[known_N] = np.nanmin(value_SN[:, known_N], axis=0)
    high_N[known_N] = np.nanmax(value_SN[:, known_N], axis=0)
    return Curve(runs[0].arm, lacking(key) if lost else key, step_N.astype(np.int64), mean_N, low_N, high_N, window)


def lacking(key: str) -> str:
    """The name of 1 minus a metric."""
    return f"1 - {key}"


def curves_of(results: Results, keys: Iterable[str], *, window: int = 1) -> list[Curve]:
    """Every arm's curve of each of these metrics, metric by metric."""
    return [curve(results.runs[arm], key, window=window) for key in keys for arm in results.arms]


def mean_of(runs: Sequence[TrainedRun], key: str, *, last: float = 1.0) -> FloatArray:
    """Each seed's mean of a metric over the last share of its steps, at least one step: (S,), NaN if absent."""
    means = []
    for run in runs:
        values = run.metric(key)
        means.append(known_mean(values[-max(1, math.ceil(last * values.size)) :]))
    return np.array(means)


def ends_of(curves: Sequence[Curve]) -> list[float]:
    """The smallest and the largest seed at each step, of all curves."""
    return [float(value) for curve in curves for band in (curve.low_N, curve.high_N) for value in band]


def draw_metric(ax: Axes, curves: Sequence[Curve], metric: str, title: str, arms: Sequence[str]) -> list[Curve]:
    """Draw the curves of one metric into its panel, with a log axis if it spans decades; returns them."""
    own = [curve for curve in curves if curve.metric == metric]
    draw_curves(ax, own, arms)
    if metric in MAGNITUDES:
        set_magnitude_scale(ax, ends_of(own))
    ax.set_title(title)
    return own


def draw_curves(ax: Axes, curves: Sequence[Curve], arms: Sequence[str], *, dash: Dash | None = None) -> None:
    """Draw mean lines and seed bands, or a note if no run has the metric. `dash` replaces the arms' own dashes and
    markers."""
    if dash is None and all(math.isnan(value) for value in ends_of(curves)):
        say_in_the_middle(ax)
        ax.set(xticks=[], yticks=[])
        return
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    styles = arm_styles(arms)
    for curve in curves:
        colour, own_dash, marker = styles[curve.arm]
        (line,) = ax.plot(curve.step_N, curve.mean_N, color=colour, linestyle=dash or own_dash)
        # A single step is a point: a line through it would be invisible.
        if dash is None or curve.step_N.size == 1:
            set_marks(line, marker, list(styles).index(curve.arm), len(styles))
        ax.fill_between(curve.step_N, curve.low_N, curve.high_N, color=colour, alpha=0.15, linewidth=0)
