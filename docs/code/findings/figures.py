"""Figures of the findings: from published numbers, narrow enough for a phone, with a shape beside each colour."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from findings.lookups import floor, k3, over_one_minus_p, rate, run_of, score
from findings.number import Number
from tailrl.artifacts.tables import Row
from tailrl.config.load import read_yaml
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
from tailrl.runtime.errors import StudyError

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
    "top-p": (RED, "<"),
    "top-k": (RED, ">"),
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


def remedy_points() -> list[Row]:
    """The table behind the figure of remedies: a row for each point.

    Raises StudyError if an arm has another learning rate than its panel, or is not published.
    """
    rows: list[Row] = []
    for panel, groups in read_yaml(Path(__file__).with_name("remedies.yaml")).items():
        for (study, naive), arms in groups:
            size = 0.0 if (study, naive) in (("dose_response", "naive"), ("stress", "exact")) else k3(study, naive).mean
            for remedy, arm in arms.items():
                if remedy not in LOOKS or rate(study, arm) != panel:
                    raise StudyError(f"remedies.yaml: {study}, {arm}: no look for {remedy}, or not at {panel}")
                found = score(study, arm)
                row: Row = {"rate": panel, "remedy": remedy, "study": study, "arm": arm, "cause": _cause(study, naive)}
                rows.append({**row, "k3_of_naive": size, "score": found.mean, "low": found.low, "high": found.high})
    return rows


def _cause(study: str, arm: str) -> str:
    disturbance = run_of(study, arm).disturbance
    if disturbance.staleness:
        return f"{disturbance.staleness} steps old"
    return f"{floor(study, arm)} random tokens" if disturbance.floor else "rounding or none"


GAP = (1.55, 1.75)
"""The part of the axis where k3 from 1e-4 to 0.1 would stand, for which nothing is drawn."""


def _large(row: Row) -> bool:
    return _place(float(str(row["k3_of_naive"]))) > GAP[1]


def _near(row: Row, size: float) -> bool:
    """Whether a point stands where others of this k3 do, beside which it is put."""
    return abs(_place(float(str(row["k3_of_naive"]))) - _place(size)) < 0.4


def _place(size: float) -> float:
    """Where a k3 stands on the axis: exact zero, then rounding, then a gap, then decades."""
    return 0.0 if size == 0 else 1.0 if size < 1e-3 else 2.1 + 3.4 * math.log10(size / 0.1)


def draw_remedies(path: Path, rows: Sequence[Row], base: Number) -> None:
    """Held-out score against the k3 of naive, a panel for each learning rate."""
    with style():
        figure = Figure(figsize=(WIDTH, 6.6), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True)
        for ax, panel in zip(panels, ("1e-4", "3e-4"), strict=True):
            own = [row for row in rows if row["rate"] == panel]
            _draw_panel(ax, own, base)
            ax.set_title(f"learning rate {panel}", fontsize=10)
        used = [name for name in LOOKS if any(row["remedy"] == name for row in rows)]
        lines = [Line2D([], [], color=LOOKS[n][0], marker=LOOKS[n][1], linestyle="") for n in used]
        figure.legend(lines, used, loc="outside upper center", ncols=3, fontsize=9, handletextpad=0.1, columnspacing=1)
        ticks = (0, 2e-5, 0.1, 0.2, 0.5, 1, 2)
        panels[1].set_xticks([_place(x) for x in ticks], ["0", "2e-5", *(f"{x:g}" for x in ticks[2:])])
        panels[1].set_xlabel("k3 of naive, nats a token: how large the mismatch is", fontsize=9)
    save_svg(figure, path)


def _draw_panel(ax: Axes, rows: Sequence[Row], base: Number) -> None:
    causes = {str(row["cause"]).split()[-1] for row in rows if _large(row)}
    by_place = sorted(rows, key=lambda row: float(str(row["k3_of_naive"])))
    for name in (name for name in LOOKS if any(row["remedy"] == name for row in rows)):
        colour, marker = LOOKS[name]
        x, y = [], []
        for row in (row for row in by_place if row["remedy"] == name):
            size, score, low, high = (float(str(row[key])) for key in ("k3_of_naive", "score", "low", "high"))
            beside = [n for n in LOOKS if any(r["remedy"] == n and _near(r, size) for r in rows)]
            x.append(_place(size) + (beside.index(name) - (len(beside) - 1) / 2) * min(0.12, 0.9 / len(beside)))
            y.append(score)
            ax.vlines(x[-1], low, high, color=colour, linewidth=1)
        ax.plot(x, y, marker, color=colour, markersize=5)
        if len(causes) == 1:
            joined = [i for i in range(len(x)) if x[i] > GAP[1]]
            ax.plot([x[i] for i in joined], [y[i] for i in joined], color=colour, linewidth=0.8, alpha=0.6)
    for cause in dict.fromkeys(str(row["cause"]) for row in by_place if _large(row)):
        own = [_place(float(str(row["k3_of_naive"]))) for row in by_place if row["cause"] == cause]
        words = cause.removesuffix(" random tokens") if len(causes) == 1 else cause
        ax.text(sum(own) / len(own), 0.94, words, fontsize=8, ha="center")
    if len(causes) == 1:
        ax.text(GAP[1] + 0.1, 0.94, "random:", fontsize=8)
    ax.axhline(base.mean, color=GREY, linestyle="--", linewidth=1)
    ax.text(_place(2.3), base.mean + 0.01, "untrained", color=GREY, fontsize=8, ha="right")
    ax.axvspan(*GAP, color="#EEEEEE", linewidth=0)
    ax.set(ylim=(-0.04, 1), xlim=(-0.5, _place(2.3)))
    set_percent_axis(ax, axis="y")
    ax.tick_params(labelsize=9)
    ax.set_ylabel("held-out score", fontsize=9)
