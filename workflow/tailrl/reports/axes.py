"""How the report's figures look: one colour per arm, legible type, axes that cope with zeros, stable SVG."""

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from tailrl.page_parts.drawing import ARM_COLOURS, set_scale
from tailrl.stats.intervals import Interval

WIDTH = 6.75
"""Inches, the text width of a two-column page: type prints at its real size."""

BLUE, RED, GREEN, BLACK, PINK, ORANGE, VIOLET = ARM_COLOURS

COLOUR_OF = {
    "dvp_mis": GREEN,
    "dvp": RED,
    "mis": PINK,
    "tis": ORANGE,
    "reject": VIOLET,
    "exact": BLACK,
    "naive": BLUE,
    "none": BLUE,
}
"""The colours of remedies whose names arms have in every study; the first that is part of an arm's name counts."""

Dash = Literal["-", "--", "-.", ":"] | tuple[int, tuple[int, ...]]

DASHES: tuple[Dash, ...] = ("-", "--", "-.", ":", (0, (8, 2, 2, 2, 2, 2)))
"""The arms of one colour have one each."""

ARM_MARKERS = ("o", "s", "^", "D", "v")
"""One for each of the dashes."""

MARKS_EACH = 5
"""A curve has about this many markers."""

MARK = 3.5
"""Points, the size of a curve's marker."""


class Look(NamedTuple):
    """How an arm is drawn in every figure."""

    colour: str
    dash: Dash
    marker: str


LEGEND_ROW = 0.176
"""Inches, the height of a legend's row."""

GREY = "#6E6E6E"

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    # Fixed ids and embedded glyphs: the same numbers give the same bytes, and look alike everywhere.
    "svg.hashsalt": "tailrl",
    "svg.fonttype": "path",
}


@contextmanager
def style() -> Iterator[None]:
    """A context in which new figures have the report's look."""
    with mpl.rc_context(_STYLE):
        yield


def arm_styles(arms: Sequence[str]) -> dict[str, Look]:
    """The look of each of a study's arms, the same in every figure.

    A known remedy has its own colour in all studies. The other arms take the remaining colours in order. Arms of one
    colour differ in dashes and markers.
    """
    known = {arm: _known_colour(arm) for arm in arms}
    free = [colour for colour in ARM_COLOURS if colour not in known.values()] or ARM_COLOURS
    others = [arm for arm in arms if not known[arm]]
    used, looks = Counter(dict.fromkeys(ARM_COLOURS, 0)), {}
    for arm in arms:
        colour = known[arm] or free[others.index(arm) % len(free)]
        if used[colour] >= len(DASHES):
            colour = min(ARM_COLOURS, key=used.__getitem__)
        number = used[colour] % len(DASHES)
        looks[arm] = Look(colour, DASHES[number], ARM_MARKERS[number])
        used[colour] += 1
    return looks


def _known_colour(arm: str) -> str:
    words = f"_{re.sub(r'[^a-z0-9]+', '_', arm.lower())}_"
    return next((colour for name, colour in COLOUR_OF.items() if f"_{name}_" in words), "")


def mark_places(points: int, number: int, arms: int) -> range:
    """The points of a curve that get a marker, for the arm of this number among all.

    No two arms have a marker at the same point if there are as many points as arms. So every arm shows, also where
    curves lie on each other.
    """
    stride = max(arms, math.ceil(points / MARKS_EACH))
    return range(number * stride // arms % max(points, 1), points, stride)


def set_marks(line: Line2D, marker: str, number: int, arms: int) -> None:
    """Put an arm's markers on its curve, at `mark_places` of its finite points. With fewer points than arms they nest:
    the first arm, which is drawn first, has the largest."""
    known = np.flatnonzero(np.isfinite(np.asarray(line.get_ydata(), dtype=float)))
    nested = 1.5 * (arms - 1 - number) if known.size < arms else 0.0
    line.set(marker=marker, markersize=MARK + nested, markevery=known[mark_places(known.size, number, arms)].tolist())


def make_panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of text width and `height` inches with rows x columns panels, in reading order."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [ax for row in axes for ax in row]


def arm_legend(figure: Figure, arms: Sequence[str], shown: Sequence[str] | None = None) -> None:
    """Add a legend of the arms, all or those shown, above the panels. With each row past the second the figure grows,
    so that panels keep their height."""
    names = [arm for arm in arms if shown is None or arm in shown]
    looks = arm_styles(arms)
    lines = [
        Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker, markersize=MARK)
        for look in map(looks.__getitem__, names)
    ]
    # About 14 characters of the legend's type fit an inch; a line and its gaps take 8.
    columns = min(len(names), max(1, int(14 * figure.get_figwidth()) // (max(map(len, names)) + 8)))
    figure.legend(lines, names, loc="outside upper center", ncols=columns, handlelength=1.6)
    more = max(0, math.ceil(len(names) / columns) - 2)
    figure.set_figheight(figure.get_figheight() + more * LEGEND_ROW)


def draw_intervals(
    ax: Axes, x: Sequence[float], intervals: Sequence[Interval], look: Look, *, width: float = 0.8, mark: float = 3
) -> None:
    """Draw a line of this width through the means, with markers of this size (points), and a bar an interval."""
    means = [interval.mean for interval in intervals]
    ax.plot(x, means, color=look.colour, linestyle=look.dash, marker=look.marker, linewidth=width, markersize=mark)
    lows, highs = [interval.low for interval in intervals], [interval.high for interval in intervals]
    ax.vlines(x, lows, highs, color=look.colour, linewidth=1)


def set_magnitude_scale(ax: Axes, values: Iterable[float]) -> None:
    """Give the y axis the scale of `magnitudes`."""
    set_scale(ax.yaxis, values, _power_label)


def _power_label(value: float) -> str:
    """A tick m x 10^n with a one-digit m, as mathtext."""
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    mantissa = round(abs(value) / 10.0**power)
    times = "" if mantissa == 1 else rf"{mantissa}\!\times\!"
    return f"${'-' if value < 0 else ''}{times}10^{{{power}}}$"


def set_percent_axis(ax: Axes, *, axis: str = "x") -> None:
    """Label shares of 1 as percentages."""
    formatter = FuncFormatter(lambda value, _: f"{100 * value:g}%")
    (ax.xaxis if axis == "x" else ax.yaxis).set_major_formatter(formatter)


def say_nothing_to_show(ax: Axes, reason: str) -> None:
    """Replace a panel without data by a sentence."""
    say_in_the_middle(ax, reason)
    ax.set_axis_off()


def say_in_the_middle(ax: Axes, words: str = "not recorded") -> None:
    """Write words into a panel, which keeps its axes."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color=GREY)


def save_svg(figure: Figure, path: Path) -> None:
    """Write the figure as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg_of(figure), encoding="utf-8")


def save_svg_and_pdf(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, and as PDF beside it; without dates, so that the same figure gives the same bytes."""
    save_svg(figure, path)
    with style():
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None, "Creator": None, "Producer": None})


def svg_of(figure: Figure) -> str:
    """The figure as SVG, without the date: the same figure gives the same bytes."""
    file = io.StringIO()
    with style():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()
