"""The charts of a report's first screen as places in an SVG: a template writes them, a stylesheet colours them.

Unlike the figures for paper they have text that scales, a dark mode, and values under the pointer. Lengths are in the
units of a box as wide as a phone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrl.page_parts.number_text import percent, short
from tailrl.page_parts.scales import (
    BOTTOM,
    CURVES_HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH_OF_PHONE,
    Place,
    Tick,
    linear_axis,
    magnitude_axis,
)
from tailrl.reports.axes import ARM_COLOURS, ARM_MARKERS, DASHES, Look, mark_places
from tailrl.reports.curves import Curve
from tailrl.reports.scores.numbers import Gain, PolicyScore
from tailrl.stats.intervals import Interval

ROW_HEIGHT, EDGE = 36, 10

MOST_POINTS = 200
"""A longer curve is drawn by the means of as many stretches, its band by their extremes."""

DASH_ARRAYS = ("", "7 3", "9 3 2 3", "2 3", "12 3 3 3 3 3")
"""The strokes of DASHES in SVG."""

SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.8l4.5 8h-9z",
    "M0-5l5 5-5 5-5-5z",
    "M0 4.8l4.5-8h-9z",
)
"""The shapes of ARM_MARKERS in SVG, around 0."""


@dataclass(frozen=True, slots=True)
class Key:
    """An arm in the legend: its number, its name and description, and classes and attributes of its look."""

    number: int
    name: str
    what: str
    colour: int
    dash: str
    shape: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A curve: its arm, its path, the path of its band, its marks, and its points and values as lists in text."""

    key: Key
    path: str
    band: str
    marks: tuple[tuple[float, float], ...]
    steps: str
    x: str
    values: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of curves; without lines it says `nothing recorded`."""

    title: str
    across: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[DrawnLine, ...]


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """An arm in the chart of scores; places of its seeds, its mean, and the ends of its interval."""

    key: Key
    y: float
    value: str
    tip: str
    seeds: tuple[float, ...]
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Scores:
    """The chart of held-out scores: a row an arm, and the untrained policy with its interval as a band."""

    height: float
    ticks: tuple[Tick, ...]
    rows: tuple[ScoreRow, ...]
    base: float
    base_low: float
    base_high: float
    base_value: str


def keys_of(looks: dict[str, Look], described: dict[str, str]) -> list[Key]:
    """The arms' keys, in the study's order."""
    return [
        Key(
            number,
            arm,
            described.get(arm, ""),
            ARM_COLOURS.index(look.colour),
            DASH_ARRAYS[DASHES.index(look.dash)],
            SHAPES[ARM_MARKERS.index(look.marker)],
        )
        for number, (arm, look) in enumerate(looks.items())
    ]


def score_chart(gains: Sequence[Gain], policies: Sequence[PolicyScore], base: Interval, keys: Sequence[Key]) -> Scores:
    """avg@k of each arm: a dot a seed, the mean with its interval over seeds and problems."""
    drawn = [base.mean, base.low, base.high, *(policy.avg.mean for policy in policies)]
    drawn += [end for gain in gains for end in (gain.avg.mean, gain.avg.low, gain.avg.high)]
    known = [min(1.0, max(0.0, value)) for value in drawn if math.isfinite(value)]
    at, ticks = linear_axis(known, EDGE, WIDTH_OF_PHONE - EDGE, lambda value: f"{100 * value:g} %", limits=(0.0, 1.0))
    rows = []
    for number, (gain, key) in enumerate(zip(gains, keys, strict=True)):
        own = [policy.avg.mean for policy in policies if policy.arm == gain.arm]
        seeds = ", ".join(f"{100 * value:.1f}" for value in own)
        low, high = (gain.avg.low, gain.avg.high) if math.isfinite(gain.avg.low) else (gain.avg.mean,) * 2
        rows.append(
            ScoreRow(
                key,
                TOP + ROW_HEIGHT * number,
                percent(gain.avg),
                f"{gain.arm}: {percent(gain.avg)}; seeds: {seeds}",
                tuple(map(at, own)),
                *(at(min(1.0, max(0.0, value))) for value in (gain.avg.mean, low, high)),
            )
        )
    low, high = map(at, (base.low, base.high) if math.isfinite(base.low) else (base.mean, base.mean))
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    return Scores(height, ticks, tuple(rows), at(base.mean), low, high, percent(base))


def curve_chart(
    title: str, curves: Sequence[Curve], keys: Sequence[Key], *, magnitude: bool = False, across: str = "training step"
) -> Panel:
    """One metric over the steps: an arm's mean over seeds, with a band from the smallest to the largest seed."""
    thin = [_thinned(curve) for curve in curves]
    values = [float(v) for curve in thin for band in (curve.low_N, curve.high_N) for v in band if math.isfinite(v)]
    if not values:
        return Panel(title, across, (), (), ())
    steps = [float(step) for curve in thin for step in curve.step_N]
    x_at, x_ticks = linear_axis(steps, LEFT, WIDTH_OF_PHONE - RIGHT, lambda step: f"{step:g}", whole=True)
    bottom = CURVES_HEIGHT - BOTTOM
    scaled = magnitude_axis(values, bottom, TOP) if magnitude else None
    y_at, y_ticks = scaled or linear_axis(values, bottom, TOP, lambda value: f"{value:.3g}")
    by_name = {key.name: key for key in keys}
    lines = tuple(
        _line(curve, by_name[curve.arm], len(keys), x_at, y_at) for curve in thin if np.isfinite(curve.mean_N).any()
    )
    return Panel(title, across, x_ticks, y_ticks, lines)


def _line(curve: Curve, key: Key, arms: int, x_at: Place, y_at: Place) -> DrawnLine:
    known = np.flatnonzero(np.isfinite(curve.mean_N))
    runs = [run for run in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1) if run.size]
    x = [round(x_at(float(step)), 1) for step in curve.step_N]
    mean, low, high = ([round(y_at(float(v)), 1) if math.isfinite(v) else math.nan for v in band] for band in
                       (curve.mean_N, curve.low_N, curve.high_N))  # fmt: skip
    path = " ".join(_path(x, mean, run.tolist()) for run in runs)
    band = " ".join(
        _path([*x, *x], [*high, *low], [*run.tolist(), *(run[::-1] + len(x)).tolist()]) + "Z"
        for run in runs
        if all(math.isfinite(end[at]) for end in (low, high) for at in run)
    )
    marks = tuple((x[known[place]], mean[known[place]]) for place in mark_places(known.size, key.number, arms))
    told = [(curve.step_N[at], x[at], short(float(curve.mean_N[at]))) for at in known]
    steps, places_x, values = (" ".join(str(one[part]) for one in told) for part in range(3))
    return DrawnLine(key, path, band, marks, steps, places_x, values)


def _path(x: Sequence[float], y: Sequence[float], places: Iterable[int]) -> str:
    return "M" + "L".join(f"{x[at]:g} {y[at]:g}" for at in places)


def _thinned(curve: Curve) -> Curve:
    """The curve by at most MOST_POINTS points."""
    size = math.ceil(curve.step_N.size / MOST_POINTS)
    if size <= 1:
        return curve
    parts = [slice(begin, begin + size) for begin in range(0, curve.step_N.size, size)]
    step_N = np.array([curve.step_N[part][curve.step_N[part].size // 2] for part in parts])
    mean_N, low_N, high_N = (
        np.array([how(known) if (known := band_N[part][~np.isnan(band_N[part])]).size else math.nan for part in parts])
        for band_N, how in ((curve.mean_N, np.mean), (curve.low_N, np.min), (curve.high_N, np.max))
    )
    return Curve(curve.arm, curve.metric, step_N, mean_N, low_N, high_N, curve.window)
