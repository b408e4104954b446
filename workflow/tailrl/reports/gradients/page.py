"""The arms' gradient estimators against the exact gradient: medians and ranges over models, and their figure."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tailrl.artifacts.claims import write_verdicts
from tailrl.artifacts.probes import GradientsRecord, read_quality
from tailrl.artifacts.records import read_record
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.config.gradients import NO_MISMATCH, GradientQuality
from tailrl.page_parts.number_text import short
from tailrl.reports.axes import LEGEND_ROW, arm_legend, arm_styles, make_panels, save_svg, set_magnitude_scale, style
from tailrl.reports.gradients.endpoints import judge_gradients
from tailrl.reports.gradients.numbers import CAUSE_TITLES, DOSE_LABELS, ENDS, LINE, QUALITIES, Range, Summary, summarise
from tailrl.reports.page import render

PANELS = {
    "bias": "bias / |∇J|",
    "deviation_ratio": "standard deviation",
    "error_ratio": "rms error",
    "cosine_ratio": "mean cosine with ∇J",
}
"""The rows of the figure; ratios are relative to the first arm without mismatch, in the same model."""

CLOSE = 20
"""Points closer than such a part of an axis share one text."""

LOWEST = {"bias": 1e-4, "deviation_ratio": 0.1, "error_ratio": 0.1}
"""Smaller values are drawn here, on log axes: an unbiased bias is rounding, and rejected steps deviate by 0."""


def write_gradients(results: Path, out: Path) -> None:
    """Write out/gradient_quality.csv, .md and .svg, each model's numbers as out/models.csv, and out/claims.csv.

    Raises:
        StudyError: results/quality.jsonl or results/run.json is missing, unreadable or empty.
    """
    qualities = read_quality(results)
    summaries = summarise(qualities)
    write_csv(out / "models.csv", ({name: getattr(row, name) for name in LINE} for row in qualities))
    write_csv(out / "gradient_quality.csv", flat_rows(summaries))
    settings = read_record(results, GradientsRecord).probe
    equal = bool(settings.quality.nats)
    draw = trade_figure if equal else gradient_figure
    save_svg(draw(summaries), out / "gradient_quality.svg")
    (out / "gradient_quality.md").write_text(_page(summaries, settings.quality), encoding="utf-8")
    # Doses are then the k3 at which kinds are compared.
    write_verdicts(out / "claims.csv", judge_gradients(summaries, settings.arms, equal))


def gradient_figure(summaries: Sequence[Summary]) -> Figure:
    """Bias, standard deviation, rms error and cosine (rows) against the dose of each mismatch (columns)."""
    arms = list(dict.fromkeys(s.arm for s in summaries))
    kinds = [kind for kind in dict.fromkeys(s.mismatch for s in summaries) if kind != NO_MISMATCH] or [NO_MISMATCH]
    with style():
        figure, panels = make_panels(len(PANELS), len(kinds), 0.6 + 1.75 * len(PANELS))
        for index, (metric, title) in enumerate(PANELS.items()):
            row = panels[index * len(kinds) : (index + 1) * len(kinds)]
            drawn = []
            for ax, kind in zip(row, kinds, strict=True):
                drawn += _draw(ax, metric, [s for s in summaries if s.mismatch in (NO_MISMATCH, kind)], arms)
            for ax in row[1:]:
                ax.sharey(row[0])
                ax.tick_params(labelleft=False)
            if metric in LOWEST:
                set_magnitude_scale(row[0], drawn)
            row[0].set_ylabel(title)
        for ax, kind in zip(panels[-len(kinds) :], kinds, strict=True):
            ax.set_xlabel(DOSE_LABELS.get(kind, kind))
        arm_legend(figure, arms)
    return figure


def trade_figure(summaries: Sequence[Summary]) -> Figure:
    """Bias against standard deviation of every arm, by its number in the legend: a panel a cause and k3."""
    arms = list(dict.fromkeys(s.arm for s in summaries))
    cells = [(s.mismatch, s.dose) for s in summaries if s.mismatch != NO_MISMATCH]
    kinds, doses = (list(dict.fromkeys(column)) for column in zip(*cells, strict=True))
    with style():
        figure, panels = make_panels(len(doses), len(kinds), 0.6 + 2.1 * len(doses))
        for (dose, kind), ax in zip(itertools.product(doses, kinds), panels, strict=True):
            own = {s.arm: s for s in summaries if (s.mismatch, s.dose) == (kind, dose)}
            places = [(own[arm].bias.median, own[arm].deviation_ratio.median) for arm in arms]
            for place, arm in zip(places, arms, strict=True):
                ax.plot(*place, ".", color=arm_styles(arms)[arm].colour, markersize=3)
            for place, numbers in _together(places):
                ax.annotate(numbers, place, fontsize=4, xytext=(1.5, 1), textcoords="offset points")
            if dose == doses[0]:
                ax.set_title(CAUSE_TITLES.get(kind, kind), fontsize=7)
            if dose == doses[-1]:
                ax.set_xlabel(PANELS["bias"])
            if kind == kinds[0]:
                ax.set_ylabel(f"k3 of {dose:g}: {PANELS['deviation_ratio']}")
        names = [f"{number} {arm}" for number, arm in enumerate(arms, 1)]
        lines = [Line2D([], [], color=arm_styles(arms)[arm].colour, marker=".", linestyle="") for arm in arms]
        figure.legend(lines, names, loc="outside lower center", ncols=4, handlelength=0.5)
        figure.set_figheight(figure.get_figheight() + len(arms) * LEGEND_ROW / 4)
    return figure


def _together(places: Sequence[tuple[float, float]]) -> list[tuple[tuple[float, float], str]]:
    """The numbers of the points, from 1, in one text for those that lie close together; each at its first point."""
    spans = [(max(column) - min(column)) / CLOSE or 1.0 for column in zip(*places, strict=True)]
    found: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(places, 1):
        cell = tuple(round(value / span) for value, span in zip(place, spans, strict=True))
        found.setdefault(cell, []).append(number)
    return [(places[numbers[0] - 1], _ranges(numbers)) for numbers in found.values()]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs shortened: 1, 3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _draw(ax: Axes, metric: str, summaries: Sequence[Summary], arms: Sequence[str]) -> list[float]:
    """Draw medians over models as a line, ranges as bars, arms side by side at each dose; returns the drawn values."""
    drawn: list[float] = []
    doses = list(dict.fromkeys(s.dose for s in summaries))
    lowest = LOWEST.get(metric, -math.inf)
    for index, (arm, (colour, dash, _)) in enumerate(arm_styles(arms).items()):
        own = [(s.dose, getattr(s, metric)) for s in summaries if s.arm == arm]
        x = [doses.index(dose) + 0.6 * ((index + 0.5) / len(arms) - 0.5) for dose, _ in own]
        median_X, low_X, high_X = ([max(v, lowest) for v in (getattr(r, end) for _, r in own)] for end in ENDS)
        ax.plot(x, median_X, color=colour, linestyle=dash, linewidth=1)
        ax.vlines(x, low_X, high_X, color=colour, linewidth=0.5)
        drawn += [*low_X, *high_X]
    ax.set_xticks(range(len(doses)), [f"{dose:g}" for dose in doses], fontsize=6)
    return drawn


def _page(summaries: Sequence[Summary], settings: GradientQuality) -> str:
    doses = []
    for (kind, dose), group in itertools.groupby(summaries, key=lambda s: (s.mismatch, s.dose)):
        own, title = list(group), _title(kind, dose, equal=bool(settings.nats))
        rows = [(s, [_cell(getattr(s, name)) for name in QUALITIES]) for s in own]
        doses.append((f"{title[0].upper()}{title[1:]}", _cell(own[0].divergence), rows))
    return render(
        "gradients/page.md.j2", summaries=summaries, settings=settings, columns=list(QUALITIES.values()), doses=doses
    )


def _title(kind: str, dose: float, *, equal: bool) -> str:
    if kind == NO_MISMATCH:
        return "No mismatch"
    return (
        f"{CAUSE_TITLES.get(kind, kind)} at a k3 of {dose:g}" if equal else f"{DOSE_LABELS.get(kind, kind)}: {dose:g}"
    )


def _cell(values: Range) -> str:
    """Median with range; below a millionth a value is rounding, shown as 0."""
    if math.isnan(values.median):
        return ""
    middle, low, high = (short(0.0 if abs(v) < 1e-6 else v) for v in (values.median, values.low, values.high))
    return middle if low == high else f"{middle} ({low} to {high})"
