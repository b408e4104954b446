"""The arms' gradient estimators compared with the exact gradient: medians and ranges over models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tailrl.artifacts.probes import Quality
from tailrl.config.gradients import NO_MISMATCH

RATIOS = ("deviation", "error", "cosine")

QUALITIES = {
    "bias": "bias",
    "bias_constrained": "bias against ∇J_mp",
    "deviation": "standard deviation",
    "error": "rms error",
    "direction": "cosine of the mean",
    "cosine": "mean cosine",
}
"""The columns of the tables, by their names in quality.jsonl."""

LINE = ("mismatch", "dose", "model", "arm", "divergence", "lacking", *QUALITIES, "cosine_half_width")
"""The columns of the table of single models."""

DOSE_LABELS = {
    "noise": "noise σ on every logit (nats)",
    "floor": "tail floor η",
    "bias": "error of each token (nats)",
    "rounding": "grid step over the largest logit",
    "old": "length of the step, in logits",
}
"""The columns of the figure; the mismatch `none` is the left end of each."""

CAUSE_TITLES = {"noise": "noise", "floor": "floor", "bias": "bias of tokens", "rounding": "rounding"}
CAUSE_TITLES |= {"old": "old weights"}
"""The causes in words, where they are compared at equal k3."""

ROUNDING = 1e-9
"""Errors whose relative difference is smaller count as equal."""


@dataclass(frozen=True, slots=True)
class Range:
    """Median, smallest and largest value over models; NaN where no model has one."""

    median: float
    low: float
    high: float


ENDS = ("median", "low", "high")


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm at one dose over all models; see `tailrl.artifacts.probes.Quality` for the values.

    Attributes:
        less_error: models in which the rms error is below that of the study's first arm, at this dose.
        nested: models in which the sampler's set contains the trainer's, in every state.
        nested_bias: the largest bias_constrained of those models; NaN without any.
        half_width: the largest half-width of a model's interval for the mean cosine.
        deviation_ratio, error_ratio, cosine_ratio: relative to the first arm without mismatch, in the same model. So
            the ranges show the dose's effect, not differences between models.
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


def summarise(rows: Sequence[Quality]) -> list[Summary]:
    """One summary per dose and arm, in the order of measurement; the first arm is the reference."""
    reference = {(r.mismatch, r.dose, r.model): r for r in rows if r.arm == rows[0].arm}
    groups: dict[tuple[str, float, str], list[Quality]] = {}
    for row in rows:
        groups.setdefault((row.mismatch, row.dose, row.arm), []).append(row)
    summaries = []
    for (kind, dose, arm), own in groups.items():
        beside = [reference[kind, dose, r.model] for r in own]
        start = [reference[NO_MISMATCH, 0.0, r.model] for r in own]
        less = sum(r.error < (1 - ROUNDING) * b.error for r, b in zip(own, beside, strict=True))
        ranges = [_range([getattr(r, name) for r in own]) for name in ("divergence", *QUALITIES)]
        ratios = [
            _range([getattr(r, name) / getattr(s, name) for r, s in zip(own, start, strict=True)]) for name in RATIOS
        ]
        half_width = max(r.cosine_half_width for r in own)
        nested = [r.bias_constrained for r in own if not r.lacking]
        summaries.append(
            Summary(kind, dose, arm, len(own), less, len(nested), _range(nested).high, half_width, *ranges, *ratios)
        )
    return summaries


def _range(values: Sequence[float]) -> Range:
    known = [value for value in values if not math.isnan(value)]
    return Range(median(known), min(known), max(known)) if known else Range(math.nan, math.nan, math.nan)
