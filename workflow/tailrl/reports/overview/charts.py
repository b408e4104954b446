"""The charts of a report's first screen. Unlike the figures for paper they have switches for arms, and values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

from tailrl.config.study import BASE_ARM
from tailrl.page_parts.drawing import INK, PAGE, SOFT, Marks, chart, in_page, set_magnitudes
from tailrl.page_parts.number_text import percent, short
from tailrl.reports.axes import Look, set_marks
from tailrl.reports.curves import Curve
from tailrl.reports.scores.numbers import Gain, GreedyScore, PolicyScore
from tailrl.stats.intervals import Interval

ROW = 36 / 72  # inches of an arm in the chart of scores
FOOT = 46 / 72

MOST_POINTS = 200
"""A longer curve is drawn by the means of as many stretches, its band by their extremes."""


@dataclass(frozen=True, slots=True)
class Key:
    """An arm in the legend: its number, its name, what it is, its look, and its line and mark as an <svg> element."""

    number: int
    name: str
    what: str
    look: Look
    swatch: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of curves."""

    title: str
    svg: str


def keys_of(looks: dict[str, Look], described: dict[str, str]) -> list[Key]:
    """The arms' keys, in the study's order."""
    return [
        Key(number, arm, described.get(arm, ""), look, _swatch(look, number))
        for number, (arm, look) in enumerate(looks.items())
    ]


def score_chart(
    gains: Sequence[Gain],
    policies: Sequence[PolicyScore],
    base: Interval,
    keys: Sequence[Key],
    samples: int,
    greedy: Sequence[GreedyScore] = (),
) -> Panel:
    """avg@k of each arm: a dot a seed, the mean with its interval over seeds and problems; the untrained one's band.

    Greedy scores, where there are any, are open diamonds in the same rows, the untrained policy's a dotted line.
    """
    marks: Marks = {}
    greedy_of = {score.arm: score.greedy for score in greedy}
    with chart(f"dashed: untrained policy, {percent(base)}", ROW * len(gains) + FOOT) as (figure, plane):
        low, high = (base.low, base.high) if math.isfinite(base.low) else (base.mean, base.mean)
        plane.axvspan(low, high, color=SOFT, alpha=0.13, linewidth=0)
        plane.axvline(base.mean, color=SOFT, linestyle=(0, (4, 2.5)), linewidth=1.3)
        if greedy:
            plane.axvline(greedy_of[BASE_ARM].mean, color=SOFT, linestyle=":", linewidth=1.3)
        for gain, key in zip(gains, keys, strict=True):
            own = [policy.avg.mean for policy in policies if policy.arm == gain.arm]
            seeds = ", ".join(f"{100 * value:.1f}" for value in own)
            values = {
                "class": f"series row arm-{key.number}",
                "data-tip": f"{gain.arm}: {percent(gain.avg)}; seeds: {seeds}",
            }
            _draw_score(plane, gain, own, key)
            if greedy:
                values["data-tip"] += f"; greedy: {percent(greedy_of[gain.arm])}"
                _draw_greedy(plane, greedy_of[gain.arm], key)
                marks[f"greedy{key.number}"] = values
            marks |= {f"{part}{key.number}": values for part in ("reach", "name", "value", "interval", "seeds", "mean")}
        plane.set_ylim(len(gains), 0)
        plane.set_yticks([])
        plane.grid(visible=True, axis="x")
        left, right = plane.get_xlim()
        plane.set_xlim(max(left, 0.0), min(right, 1.0))
        plane.xaxis.set_major_locator(MaxNLocator(5))
        plane.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        title = f"Held-out score (avg@{samples})"
        words = "Held-out score of each arm with its interval; the table below has the numbers"
        return Panel(title, in_page(figure, "score", words, marks))


def _draw_score(plane: Axes, gain: Gain, own: Sequence[float], key: Key) -> None:
    top, middle, colour, number = key.number, key.number + 0.67, key.look.colour, key.number
    across = plane.get_yaxis_transform()
    plane.axhspan(top, top + 0.94, color=PAGE, alpha=0, linewidth=0, gid=f"reach{number}")
    for x, text, side, name in ((0, gain.arm, "left", "name"), (1, percent(gain.avg), "right", "value")):
        label = plane.text(
            x, top + 0.28, text, transform=across, ha=side, va="center", color=INK, gid=f"{name}{number}"
        )
        label.set_fontweight("bold" if name == "name" else "normal")
    if math.isfinite(gain.avg.low):
        ends = [max(0.0, gain.avg.low), min(1.0, gain.avg.high)]
        plane.plot(ends, [middle, middle], color=colour, linewidth=2, gid=f"interval{number}")
    plane.plot(own, [middle] * len(own), "o", color=colour, markersize=5, alpha=0.45, linewidth=0, gid=f"seeds{number}")
    (mean,) = plane.plot(gain.avg.mean, middle, color=colour, clip_on=False, gid=f"mean{number}")
    _mark(mean, key.look, 8)


def _draw_greedy(plane: Axes, greedy: Interval, key: Key) -> None:
    (diamond,) = plane.plot(greedy.mean, key.number + 0.67, "D", clip_on=False, gid=f"greedy{key.number}", markersize=7)
    diamond.set_markerfacecolor(PAGE)
    diamond.set_markeredgecolor(key.look.colour)
    diamond.set_markeredgewidth(1.4)


def _mark(line: Line2D, look: Look, size: float) -> None:
    line.set_marker(look.marker)
    line.set_markersize(size)
    line.set_markeredgecolor(PAGE)
    line.set_markeredgewidth(0.8)


def curve_chart(
    name: str, title: str, curves: Sequence[Curve], keys: Sequence[Key], *, magnitude: bool = False
) -> Panel:
    """One metric over the steps: an arm's mean over seeds, with a band from the smallest to the largest seed."""
    thin = [curve for curve in map(_thinned, curves) if np.isfinite(curve.mean_N).any()]
    by_name = {key.name: key for key in keys}
    with chart("training step") as (figure, plane):
        for curve in thin:
            _draw_curve(plane, curve, by_name[curve.arm], len(keys))
        if not thin:
            plane.text(0.5, 0.5, "not recorded", transform=plane.transAxes, ha="center", va="center", color=SOFT)
            plane.set(xticks=[], yticks=[])
        else:
            plane.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        values = [float(value) for curve in thin for band in (curve.low_N, curve.high_N) for value in band]
        if not magnitude or not set_magnitudes(plane.yaxis, values):
            plane.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        # A ruler at the left edge of the figure, which the page's script moves.
        at = blended_transform_factory(figure.transFigure, plane.transAxes)
        plane.add_line(Line2D([0, 0], [0, 1], transform=at, color=SOFT, linewidth=1, clip_on=False, gid="ruler"))

        def marks() -> Marks:
            found: Marks = {"ruler": {"class": "ruler"}}
            for curve in thin:
                arm = {"class": f"series arm-{by_name[curve.arm].number}"}
                found[f"band{by_name[curve.arm].number}"] = arm
                found[f"line{by_name[curve.arm].number}"] = {**arm, "title": curve.arm, **_values(plane, curve)}
            return found

        words = f"{title} over the training steps; the table has the numbers"
        return Panel(title, in_page(figure, name, words, marks, kind="curves"))


def _draw_curve(plane: Axes, curve: Curve, key: Key, arms: int) -> None:
    finite_N = np.isfinite(curve.mean_N)
    mean_N = np.where(finite_N, curve.mean_N, np.nan)
    colour = key.look.colour
    known_N = finite_N & np.isfinite(curve.low_N) & np.isfinite(curve.high_N)
    band = plane.fill_between(curve.step_N, curve.low_N, curve.high_N, where=known_N.tolist(), color=colour)
    band.set(alpha=0.16, linewidth=0, gid=f"band{key.number}")
    (line,) = plane.plot(curve.step_N, mean_N, color=colour, linestyle=key.look.dash, gid=f"line{key.number}")
    set_marks(line, key.look.marker, key.number, arms)
    _mark(line, key.look, 7)


def _values(plane: Axes, curve: Curve) -> dict[str, str]:
    """What the page's script reads: the known steps, where they lie in the figure, and their values."""
    known = np.flatnonzero(np.isfinite(curve.mean_N))
    places = plane.transData.transform([(float(curve.step_N[at]), 0.0) for at in known])[:, 0]
    return {
        "data-name": curve.arm,
        "data-steps": " ".join(str(curve.step_N[at]) for at in known),
        "data-x": " ".join(f"{place:.1f}" for place in places),
        "data-values": " ".join(short(float(curve.mean_N[at])) for at in known),
    }


def _swatch(look: Look, number: int) -> str:
    """A line and a mark as in the charts."""
    with mpl.rc_context():
        figure = Figure(figsize=(30 / 72, 12 / 72), dpi=72, facecolor="none")
        figure.add_artist(Line2D([0.03, 0.97], [0.5, 0.5], color=look.colour, linestyle=look.dash, linewidth=1.8))
        mark = Line2D([0.5], [0.5], color=look.colour)
        _mark(mark, look, 7)
        figure.add_artist(mark)
        return in_page(figure, f"swatch{number}", "", {}, kind="swatch")


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
