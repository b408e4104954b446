"""Figures of the findings: from published numbers, narrow enough for a phone, with a shape beside each colour."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from findings.lookups import (
    at_rate,
    averaged,
    difference,
    greedy_difference,
    in_parts,
    k3,
    over_one_minus_p,
    over_parts,
    planned_test,
)
from findings.number import Number
from tailrl.artifacts.tables import Row
from tailrl.config.load import read_yaml
from tailrl.config.results import whole_and_part
from tailrl.page_parts.drawing import ARM_COLOURS
from tailrl.reports.axes import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    VIOLET,
    save_svg,
    set_percent_axis,
    style,
)

WIDTH = 4.7
"""Inches: on a phone of 390 pixels a type of 9 points stays above 9 pixels."""

LOOKS = {
    "naive": (BLUE, "o"),
    "matched control": (GREY, "X"),
    "no mismatch": (BLACK, "|"),
    "token TIS": (ORANGE, "s"),
    "MIS, C above clean": (PINK, "^"),
    "MIS, C = 2": (PINK, "v"),
    "rejection": (VIOLET, "P"),
    "TIS + rejection": (VIOLET, "p"),
    "DVP": (RED, "D"),
    "DVP, paper's ρ": (RED, "1"),
    "DVP + MIS": (GREEN, "d"),
    "verified": (BLACK, "*"),
    "float16 engine": (BLUE, "2"),
}
"""Colour and marker of each remedy, everywhere on these pages."""

MARKERS = "oDs^vP"
Rows = Mapping[str, Number | Mapping[str, Number]]


def dot_rows(rows: Rows) -> list[Row]:
    """The table behind a figure of dots."""
    return [
        {"row": name, "series": series, "mean": number.mean, "low": number.low, "high": number.high}
        for name, value in rows.items()
        for series, number in (value.items() if isinstance(value, Mapping) else [("", value)])
    ]


def draw_dots(path: Path, rows: Rows, label: str, line: Number | None) -> None:
    """A row for each name: dots with intervals, one or one of each series; `line` is a vertical line."""
    several = {name: value if isinstance(value, Mapping) else {"": value} for name, value in rows.items()}
    series = list(dict.fromkeys(key for value in several.values() for key in value))
    looks = {key: LOOKS.get(key, (ARM_COLOURS[i % 7], MARKERS[i % 6])) for i, key in enumerate(series)}
    height = 0.75 + 0.22 * len(rows) + 0.12 * len(rows) * len(series) + (0.25 if len(series) > 1 else 0)
    with style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        ax = figure.subplots()
        for place, (name, values) in enumerate(several.items()):
            for key, number in values.items():
                y = place + (series.index(key) - (len(series) - 1) / 2) * 0.7 / len(series)
                colour, marker = LOOKS.get(name, looks[key]) if series == [""] else looks[key]
                ax.hlines(y, number.low, number.high, color=colour, linewidth=1.4)
                ax.plot(number.mean, y, marker, color=colour, markersize=6)
        if line is not None:
            ax.axvline(line.mean, color=GREY, linestyle="--", linewidth=1)
            top = (line.mean, 1.0)
            ax.annotate("untrained", top, xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)
        _dress(ax, list(rows), label, next(iter(several.values()))[series[0]])
        if len(series) > 1:
            lines = [Line2D([], [], color=c, marker=m, linestyle="-") for c, m in looks.values()]
            figure.legend(lines, series, loc="outside upper center", ncols=min(3, len(series)), fontsize=9)
    save_svg(figure, path)


def _dress(ax: Axes, names: Sequence[str], label: str, kind: Number) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(labelsize=9)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(label, fontsize=9)
    if kind.unit == "%":
        low, high = ax.get_xlim()
        ax.set_xlim(max(low, -0.02), min(high, 1.0))
        set_percent_axis(ax)
    if kind.unit == "points":
        ax.axvline(0, color=GREY, linewidth=1)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g}".replace("-", "−")))


SHAPES = {
    "SmolLM2-135M, bfloat16": ("smollm2_checks", "vllm_bf16"),
    "small policy, bfloat16": ("distributions", "vllm_bf16"),
    "small policy, float16": ("distributions", "vllm_fp16"),
}


def shape_rows() -> list[Row]:
    """The table behind the figure of |Δ| by probability."""
    return [
        {
            "policy": name,
            "minus_ln_p": x,
            "size": size.mean,
            "low": size.low,
            "high": size.high,
            "over_one_minus_p": over,
        }
        for name, source in SHAPES.items()
        for x, size, over in over_one_minus_p(*source)
    ]


def draw_shape(path: Path) -> None:
    """Mean |Δ| against −ln p, and the curves that are proportional to 1 − p."""
    with style():
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        ax = figure.subplots()
        grid = [0.03 * 1.05**i for i in range(134)]
        for source, colour, marker in zip(SHAPES.values(), ARM_COLOURS, MARKERS, strict=False):
            bins = over_one_minus_p(*source)
            middle = sorted(over for _, _, over in bins)[len(bins) // 2]
            ax.plot(grid, [middle * -math.expm1(-x) for x in grid], color=colour, linewidth=1, linestyle="--")
            ax.vlines([x for x, _, _ in bins], [s.low for _, s, _ in bins], [s.high for _, s, _ in bins], color=colour)
            ax.plot([x for x, _, _ in bins], [s.mean for _, s, _ in bins], marker, color=colour, markersize=5, zorder=3)
        ax.set(xscale="log", yscale="log")
        ax.set_xticks([0.05, 0.3, 1, 3, 10, 20], ["0.95", "0.74", "0.37", "0.05", "5e-5", "2e-9"])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.tick_params(labelsize=9)
        ax.set_xlabel("probability p of the token, on a scale of ln p", fontsize=9)
        ax.set_ylabel("mean |Δ|, nats", fontsize=9)
        lines = [*ax.get_lines()[1::2], Line2D([], [], color=GREY, linestyle="--")]
        figure.legend(lines, [*SHAPES, "c (1 − p)"], loc="outside upper center", ncols=2, fontsize=9)
    save_svg(figure, path)


HARM_MARKERS = {"engine": "o", "random tokens": "D", "old weights": "s"}
HARM_COLOURS = {"temperature 1": BLUE, "greedy": ORANGE}
LEVEL = 0.03
"""Half the width of the band in which a loss counts as none: the margin of the studies of engines."""

APART = 1.3
"""By this factor in k3 the points of one name are drawn apart, so that none hides another."""


def joined(names: Iterable[str]) -> str:
    """Each name once, in order."""
    return ", ".join(dict.fromkeys(names))


def harm_points() -> list[Row]:
    """The table behind the figure of harm against size: a row for each point.

    Raises StudyError if an arm or a line is not published.
    """
    rows: list[Row] = []
    for entry in read_yaml(Path(__file__).with_name("harm.yaml"))["points"]:
        if pool := entry.get("pool"):
            pairs = [(pool, entry["arm"], entry["minus"])]
            size = over_parts(pool, "course", "k3", entry["arm"]).mean
            lost = planned_test(pool, entry["family"], entry["arm"], entry["minus"])
        elif study := entry.get("study"):
            pairs = [(study, entry["arm"], entry["minus"])]
            size = k3(study, entry["arm"]).mean
            lost = (greedy_difference if entry["score"] == "greedy" else difference)(*pairs[0])
        else:
            pairs = at_rate(**entry["at_rate"]) if "at_rate" in entry else []
            pairs += [pair for target, arms in entry.get("in_parts", {}).items() for pair in in_parts(target, *arms)]
            size = sum(k3(study, arm).mean for study, arm, _ in pairs) / len(pairs)
            lost = averaged(pairs)
        rows.append(
            {
                **{key: entry[key] for key in ("of", "kind", "score")},
                "arm": joined(arm for _, arm, _ in pairs),
                "minus": joined(minus for _, _, minus in pairs),
                "study": joined(whole_and_part(name)[0] for name, _, _ in pairs),
                **{"k3": size, "mean": lost.mean, "low": lost.low, "high": lost.high},
            }
        )
    return rows


def draw_harm(path: Path, rows: Sequence[Row]) -> None:
    """Points lost against the same training without the mismatch, by k3; filled where a real engine makes it."""
    with style():
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        ax = figure.subplots()
        ax.axhspan(-LEVEL, LEVEL, color="#EEEEEE", linewidth=0)
        ax.axhline(0, color=GREY, linewidth=1)
        for name in dict.fromkeys(str(row["of"]) for row in rows):
            own = sorted((row for row in rows if row["of"] == name), key=lambda row: float(str(row["k3"])))
            for place, row in enumerate(own):
                x, mean, low, high = (float(str(row[key])) for key in ("k3", "mean", "low", "high"))
                x *= APART ** (place - (len(own) - 1) / 2)
                colour = HARM_COLOURS[str(row["score"])]
                ax.vlines(x, low, high, color=colour, linewidth=1)
                filled = colour if row["kind"] == "engine" else "white"
                marker = HARM_MARKERS[str(row["kind"])]
                ax.plot(x, mean, marker, color=colour, markerfacecolor=filled, markersize=6, zorder=3)
            at = (
                statistics.geometric_mean(float(str(row["k3"])) for row in own),
                min(float(str(row["low"])) for row in own),
            )
            ax.annotate(
                name, at, xytext=(0, -3), textcoords="offset points", fontsize=8, rotation=90, ha="center", va="top"
            )
        ax.set(xscale="log", xlim=(8e-6, 4), ylim=(-0.62, 0.12))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g}".replace("-", "−")))
        ax.tick_params(labelsize=9)
        ax.set_xlabel("k3: how large the mismatch is", fontsize=9)
        ax.set_ylabel("held-out score minus that without the mismatch, points", fontsize=9)
        used = {str(row["kind"]) for row in rows}
        lines = [Line2D([], [], color=c, linestyle="-", linewidth=3) for c in HARM_COLOURS.values()]
        kinds = [name for name in HARM_MARKERS if name in used]
        for name in kinds:
            filled = GREY if name == "engine" else "white"
            lines.append(Line2D([], [], color=GREY, marker=HARM_MARKERS[name], linestyle="", markerfacecolor=filled))
        figure.legend(lines, [*HARM_COLOURS, *kinds], loc="outside upper center", ncols=3, fontsize=9)
    save_svg(figure, path)
