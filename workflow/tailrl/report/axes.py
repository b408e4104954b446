"""How the report's figures look: one colour per arm, legible type, axes that cope with zeros, stable SVG."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

WIDTH = 6.75
"""Inches, the text width of a two-column page: type prints at its real size."""

ARM_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, safe for any colour vision, without their yellow, which is too pale for a line."""

Dash = Literal["-", "--", "-.", ":"] | tuple[int, tuple[int, ...]]

DASHES: tuple[Dash, ...] = ("-", "--", "-.", ":", (0, (8, 2, 2, 2, 2, 2)))
"""After the last colour, colours repeat with the next of these."""

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

_SMALLEST_OF_LARGEST = 1e-8
"""Magnitudes below this share of the largest are rounding; a log axis leaves them out."""


@contextmanager
def style() -> Iterator[None]:
    """A context in which new figures have the report's look."""
    with mpl.rc_context(_STYLE):
        yield


def arm_styles(arms: Sequence[str]) -> dict[str, tuple[str, Dash]]:
    """Colour and dashes of each arm, by its place in the study: the same in every figure."""
    count = len(ARM_COLOURS)
    return {arm: (ARM_COLOURS[i % count], DASHES[i // count % len(DASHES)]) for i, arm in enumerate(arms)}


def make_panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of text width and `height` inches with rows x columns panels, in reading order."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [ax for row in axes for ax in row]


def arm_legend(figure: Figure, arms: Sequence[str], shown: Sequence[str] | None = None) -> None:
    """Add a legend of the arms, all or those shown, above the panels. With each row past the second the figure grows,
    so that panels keep their height."""
    names = [arm for arm in arms if shown is None or arm in shown]
    styles = arm_styles(arms)
    lines = [Line2D([], [], color=styles[arm][0], linestyle=styles[arm][1]) for arm in names]
    # About 14 characters of the legend's type fit an inch; a line and its gaps take 8.
    columns = min(len(names), max(1, int(14 * figure.get_figwidth()) // (max(map(len, names)) + 8)))
    figure.legend(lines, names, loc="outside upper center", ncols=columns, handlelength=1.6)
    more = max(0, math.ceil(len(names) / columns) - 2)
    figure.set_figheight(figure.get_figheight() + more * LEGEND_ROW)


def set_magnitude_scale(ax: Axes, values: Iterable[float]) -> None:
    """A log y axis for magnitudes; with zeros or negative values, symmetric and linear around 0.

    An exact zero is a result (no mismatch) and must be visible, which a log axis does not allow. Values within a
    decade, and zeros alone, keep a linear axis.
    """
    known = np.array([value for value in values if math.isfinite(value)])
    nonzero = np.abs(known[known != 0])
    if not nonzero.size:
        return
    largest = float(nonzero.max())
    smallest = max(float(nonzero.min()), largest * _SMALLEST_OF_LARGEST)
    if known.min() > 0 and largest < 10 * smallest:
        return
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    powers = range(low, high + 1, max(1, math.ceil((high - low) / 4)))
    ticks = [10.0**power for power in powers]
    if known.min() > 0:
        ax.set_yscale("log")
        if largest < 100 * smallest:  # decades alone could be a single tick
            ticks = [m * 10.0**power for power in range(low, high + 1) for m in (1, 2, 5)]
    else:
        ax.set_yscale("symlog", linthresh=10.0**low, linscale=0.5)
        negative = [-tick for tick in ticks] if known.min() < -(10.0**low) else []
        ticks = [*negative[::-1], 0.0, *ticks]
    ax.autoscale_view(scalex=False)  # the margins of the linear axis would be decades on this one
    plain = low >= -2 and high <= 4
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if plain else _power_label(value)))
    ax.yaxis.set_minor_locator(NullLocator())


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
    """Write the figure as SVG, without the date: the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
