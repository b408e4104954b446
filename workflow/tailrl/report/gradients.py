"""The arms' gradient estimators against the exact gradient: medians and ranges over models, and their figure."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tailrl.errors import StudyError
from tailrl.report.axes import arm_legend, arm_styles, make_panels, save_svg, set_magnitude_scale, style
from tailrl.report.data import read_text
from tailrl.report.summary import count, short, table
from tailrl.report.tables import flat_rows, write_csv

PANELS = {
    "bias": "bias / |∇J|",
    "deviation_ratio": "standard deviation",
    "error_ratio": "rms error",
    "cosine_ratio": "mean cosine with ∇J",
}
"""The rows of the figure; a ratio is to the first arm without mismatch, in the same model."""

RATIOS = ("deviation", "error", "cosine")

COLUMNS = {
    "bias": "bias",
    "bias_constrained": "bias against ∇J_mp",
    "deviation": "standard deviation",
    "error": "rms error",
    "direction": "cosine of the mean",
    "cosine": "mean cosine",
}
"""What the tables show, by its name in quality.jsonl."""

LINE = ("mismatch", "dose", "model", "arm", "divergence", "lacking", *COLUMNS, "cosine_half_width")
"""What a line of quality.jsonl has to have."""

MISMATCHES = {
    "noise": "noise σ on every logit (nats)",
    "floor": "tail floor η",
    "bias": "error of each token (nats)",
}
"""The columns of the figure; `none` is the left end of each."""

NO_MISMATCH = "none"

LOWEST = {"bias": 1e-4, "deviation_ratio": 0.1, "error_ratio": 0.1}
"""Log axes: what is smaller is drawn here. An unbiased estimator's bias is rounding, a rejected step deviates by 0."""

ROUNDING = 1e-9
"""Errors that differ by a smaller share are equal."""


@dataclass(frozen=True, slots=True)
class Range:
    """Median, smallest and largest value over models; NaN where no model has one."""

    median: float
    low: float
    high: float


ENDS = ("median", "low", "high")


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm at one dose over all models; see `tailrl.gradients.quality.Quality` for the values.

    Attributes:
        less_error: in how many models the rms error is below that of the study's first arm, at this dose.
        nested: in how many models the sampler's set has every token of the trainer's, in every state.
        nested_bias: the largest bias_constrained of those; NaN where there is none.
        half_width: the largest half-width of a model's interval for the mean cosine.
        deviation_ratio, error_ratio, cosine_ratio: in units of the first arm's without mismatch, model by model, so
            that the ranges are of what a dose does and not of how models differ.
    """

    mismatch: str
    dose: float
    arm: str
    models: int
    less_error: int
    nested: int
    nested_bias: float
    half_width: float
    divergence: Range
    bias: Range
    bias_constrained: Range
    deviation: Range
    error: Range
    direction: Range
    cosine: Range
    deviation_ratio: Range
    error_ratio: Range
    cosine_ratio: Range


def write_gradients(results: Path, out: Path) -> tuple[list[Summary], dict[str, Any]]:
    """Writes out/gradient_quality.csv, .md and .svg, and what every single model says as out/models.csv, from
    results/quality.jsonl and results/run.json; returns the summaries and the settings of the arms.

    Raises:
        StudyError: one of them is missing, unreadable or empty.
    """
    qualities = read_qualities(results / "quality.jsonl")
    summaries = summarise(qualities)
    write_csv(out / "models.csv", ({name: row[name] for name in LINE} for row in qualities))
    write_csv(out / "gradient_quality.csv", flat_rows(summaries))
    save_svg(gradient_figure(summaries), out / "gradient_quality.svg")
    settings = _read(results / "run.json", 1)[0].get("settings", {})
    (out / "gradient_quality.md").write_text(_page(summaries, settings.get("quality", {})), encoding="utf-8")
    return summaries, settings.get("arms", {})


def read_qualities(path: Path) -> list[dict[str, Any]]:
    """The lines of quality.jsonl, null as NaN; raises StudyError where it cannot be used."""
    rows = _read(path, None)
    for number, row in enumerate(rows, start=1):
        for name in LINE:
            if name not in row:
                raise StudyError(f"{path}, line {number}: has no {name}")
    if not rows:
        raise StudyError(f"{path}: holds no line")
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def _read(path: Path, documents: int | None) -> list[dict[str, Any]]:
    """The JSON objects of a file: one to a line, or a single document."""
    text = read_text(path)
    found = []
    for number, part in enumerate([text] if documents == 1 else text.splitlines(), start=1):
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise StudyError(f"{path}, part {number}: not a JSON object")
        found.append(value)
    return found


def summarise(rows: Sequence[dict[str, Any]]) -> list[Summary]:
    """One summary for each dose and arm, in the order in which they were measured; the first arm is the reference."""
    reference = {(r["mismatch"], r["dose"], r["model"]): r for r in rows if r["arm"] == rows[0]["arm"]}
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["mismatch"], row["dose"], row["arm"]), []).append(row)
    summaries = []
    for (kind, dose, arm), own in groups.items():
        beside = [reference[kind, dose, r["model"]] for r in own]
        start = [reference[NO_MISMATCH, 0.0, r["model"]] for r in own]
        less = sum(r["error"] < (1 - ROUNDING) * b["error"] for r, b in zip(own, beside, strict=True))
        ranges = [_range([r[name] for r in own]) for name in ("divergence", *COLUMNS)]
        ratios = [_range([r[name] / s[name] for r, s in zip(own, start, strict=True)]) for name in RATIOS]
        half_width = max(r["cosine_half_width"] for r in own)
        nested = [r["bias_constrained"] for r in own if not r["lacking"]]
        summaries.append(
            Summary(kind, dose, arm, len(own), less, len(nested), _range(nested).high, half_width, *ranges, *ratios)
        )
    return summaries


def _range(values: Sequence[float]) -> Range:
    known = [value for value in values if not math.isnan(value)]
    return Range(median(known), min(known), max(known)) if known else Range(math.nan, math.nan, math.nan)


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
            ax.set_xlabel(MISMATCHES.get(kind, kind))
        arm_legend(figure, arms)
    return figure


def _draw(ax: Axes, metric: str, summaries: Sequence[Summary], arms: Sequence[str]) -> list[float]:
    """Medians over models as a line, ranges as bars; arms stand side by side at each dose. Returns what was drawn."""
    drawn: list[float] = []
    doses = list(dict.fromkeys(s.dose for s in summaries))
    lowest = LOWEST.get(metric, -math.inf)
    for index, (arm, (colour, dash)) in enumerate(arm_styles(arms).items()):
        own = [(s.dose, getattr(s, metric)) for s in summaries if s.arm == arm]
        x = [doses.index(dose) + 0.6 * ((index + 0.5) / len(arms) - 0.5) for dose, _ in own]
        median_X, low_X, high_X = ([max(v, lowest) for v in (getattr(r, end) for _, r in own)] for end in ENDS)
        ax.plot(x, median_X, color=colour, linestyle=dash, linewidth=1)
        ax.vlines(x, low_X, high_X, color=colour, linewidth=0.5)
        drawn += [*low_X, *high_X]
    ax.set_xticks(range(len(doses)), [f"{dose:g}" for dose in doses], fontsize=6)
    return drawn


# --- words ----------------------------------------------------------------------------------------------


def _page(summaries: Sequence[Summary], settings: dict[str, Any]) -> str:
    reference = summaries[0].arm
    models, drawn = count(summaries[0].models, "random model"), count(settings.get("draws", 0), "drawn step")
    introduction = (
        f"Every arm's gradient ĝ of one step against the exact gradient ∇J, on {models} "
        f"(seed {settings.get('seed')}): {settings.get('vocabulary_size')} tokens, responses of "
        f"{settings.get('length')}, steps of {settings.get('prompts')} prompts with {settings.get('group_size')} "
        "responses each. Lengths are in units of |∇J| (against ∇J_mp: of |∇J_mp|). Medians over models (smallest to "
        f"largest). All but the mean cosine are exact sums; that one is over {drawn} a model, with a 95 % interval of "
        f"at most ±{max(s.half_width for s in summaries):.2g}. The last column says in how many models the rms error "
        f"is below that of `{reference}`."
    )
    parts = ["# Gradient quality", introduction]
    header = ("arm", *COLUMNS.values(), f"less error than {reference}")
    for (kind, dose), group in _by_dose(summaries):
        title = "No mismatch" if kind == NO_MISMATCH else f"{MISMATCHES.get(kind, kind)}: {dose:g}"
        nats = group[0].divergence
        rows = [[s.arm, *(_cell(getattr(s, name)) for name in COLUMNS), f"{s.less_error} of {s.models}"] for s in group]
        parts += [f"## {title[0].upper()}{title[1:]}", f"k3 per token: {_cell(nats)} nats.", table(header, rows)]
    return "\n\n".join(parts) + "\n"


def _by_dose(summaries: Sequence[Summary]) -> Iterator[tuple[tuple[str, float], list[Summary]]]:
    for key, group in itertools.groupby(summaries, key=lambda s: (s.mismatch, s.dose)):
        yield key, list(group)


def _cell(values: Range) -> str:
    """Median with range; below a millionth it is rounding, and 0."""
    if math.isnan(values.median):
        return ""
    middle, low, high = (short(0.0 if abs(v) < 1e-6 else v) for v in (values.median, values.low, values.high))
    return middle if low == high else f"{middle} ({low} to {high})"
