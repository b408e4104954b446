"""The charts of a diagnosis as places in an SVG; templates/charts.html.j2 writes them."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.measure import NATS_EDGES, SEQUENCE_GROUPS, Measured
from tailrl.diagnosis.signature import LOGIT_CELLS, LOGIT_EDGE, POSITION_EDGES
from tailrl.page_parts.number_text import short
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
from tailrl.stats.intervals import Interval, ratio_interval

FOOT, PLANE_END = CURVES_HEIGHT - BOTTOM, WIDTH_OF_PHONE - RIGHT
"""The lower end of a chart's plane, and its right end."""

MOST_BARS = 24
"""Bins of responses, by mean |Δ| or by step."""

SHADES = 6
"""Of the joint picture: each is a factor in the number of tokens."""

ODDS_TICKS = ("0.000001", "0.001", "0.5", "0.999", "0.999999")

FEWEST_IN_A_BIN = 10
"""A bin with fewer is not drawn: it says nothing, and would set the scale."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A mean with the ends of its interval, as places; `tip` says it in words."""

    x: float
    y: float
    low: float
    high: float
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a histogram."""

    x: float
    y: float
    width: float
    tip: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: points with intervals, bars or shaded cells, with `law`, a dashed line. Without ticks nothing is known.

    `rows` are the numbers behind it; the first is the header.
    """

    name: str
    title: str
    words: str
    across: str
    up: str
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    points: tuple[Dot, ...] = ()
    bars: tuple[Bar, ...] = ()
    cells: tuple[str, ...] = ()
    law: str = ""
    rows: tuple[tuple[str, ...], ...] = ()


def charts(measured: Measured) -> list[Chart]:
    """The signature of a mismatch: those of the charts that the log can fill."""
    if not measured.tokens:
        return []
    found = [size_chart(measured), sign_chart(measured), joint_chart(measured), position_chart(measured)]
    found += [length_chart(measured), response_chart(measured)]
    steps = step_chart(measured)
    return [*found, steps] if steps else found


def size_chart(measured: Measured) -> Chart:
    """Mean |Δ| against 1 − p, with the law of Prop. 4.2: proportional to it."""
    x, means = _over_rest(measured, "size")
    total = float(measured.bins["size"].sum() / measured.bins["rest"].sum()) if measured.bins["rest"].any() else 0.0
    law = [(value, total * value) for value in (min(x), max(x))]
    words = (
        "Mean |Δ| of tokens by the probability that they did not have. Noise on the logits gives the dashed line, "
        f"|Δ| = {short(total)} × (1 − p), by Prop. 4.2 of arXiv 2512.23087. A floor at the left is rounding of "
        "log-probs. Points far above the line are no noise on logits."
    )
    return _dots("size", "Size against probability", words, ("1 − π_train", "mean |Δ|"), x, means, law=law)


def sign_chart(measured: Measured) -> Chart:
    """Mean Δ against 1 − p: which side gives a token more."""
    x, means = _over_rest(measured, "signed")
    words = (
        "Mean Δ: above 0 the trainer gives such tokens more than the sampler did. Noise leans below 0 for rare tokens, "
        "because the sampler draws what it overrates (Prop. 4.3). A shift over the whole width is a different "
        "temperature, template or set of weights."
    )
    return _dots("sign", "Sign", words, ("1 − π_train", "mean Δ"), x, means, zero=True)


def position_chart(measured: Measured) -> Chart:
    """Mean |Δ| by the token's place in its response."""
    sums = measured.signature.positions
    x, means = _means(sums["size"], sums["tokens"], [float(edge) + 1 for edge in POSITION_EDGES])
    words = "By the token's place. What grows with it comes from the cache, from context, or from errors that add up."
    return _dots("position", "By position", words, ("place in the response, from 1", "mean |Δ|"), x, means)


def length_chart(measured: Measured) -> Chart:
    """Mean |Δ| of a token by the length of its response."""
    tokens_S, size_S = measured.column("tokens"), measured.column("abs_logp")
    power_S = np.floor(np.log2(np.maximum(tokens_S, 1))).astype(np.int64)
    names = np.unique(power_S[tokens_S > 0])
    means = [_ratio(size_S, tokens_S, (power_S == power) & (tokens_S > 0)) for power in names]
    words = "By the length of the response, in powers of two."
    return _dots("length", "By length", words, ("tokens of the response", "mean |Δ|"), [2.0**n for n in names], means)


def step_chart(measured: Measured) -> Chart | None:
    """Mean |Δ| of a token by training step; None if the log has fewer than two steps."""
    tokens_S, size_S, step_S = (measured.column(name) for name in ("tokens", "abs_logp", "step"))
    known_S = np.isfinite(step_S) & (tokens_S > 0)
    steps = np.unique(step_S[known_S])
    if len(steps) < 2:
        return None
    parts = np.array_split(steps, min(len(steps), MOST_BARS))
    means = [_ratio(size_S, tokens_S, known_S & (step_S >= part[0]) & (step_S <= part[-1])) for part in parts]
    words = (
        "By training step. What grows with training comes from the policy, such as longer responses or rarer tokens."
    )
    x = [float(part.mean()) for part in parts]
    return _dots("step", "By step", words, ("training step", "mean |Δ|"), x, means, logs=False)


def response_chart(measured: Measured) -> Chart:
    """How many responses have which mean |Δ|."""
    tokens_S = measured.column("tokens")
    mean_S = measured.column("abs_logp")[tokens_S > 0] / tokens_S[tokens_S > 0]
    size_S = np.log10(np.maximum(mean_S, 1e-9))
    edges = np.linspace(size_S.min(), max(size_S.max(), size_S.min() + 0.1), MOST_BARS + 1)
    count, _ = np.histogram(size_S, edges)
    x_at, x_ticks = _axis([10**edge for edge in edges.tolist()], LEFT, PLANE_END)
    y_at, y_ticks = linear_axis([0.0, float(count.max())], FOOT, TOP, lambda value: f"{value:g}", limits=(0, math.inf))
    ends = [(10**low, 10**high) for low, high in itertools.pairwise(edges.tolist())]
    tips = [f"{short(low)} to {short(high)} nats: {n}" for (low, high), n in zip(ends, count, strict=True)]
    bars = tuple(
        Bar(round(x_at(low), 1), round(y_at(float(n)), 1), max(0.5, round(x_at(high) - x_at(low) - 0.6, 1)), tip)
        for (low, high), n, tip in zip(ends, count, tips, strict=True)
        if n
    )
    words = (
        "Responses by the mean |Δ| of their tokens. Two hills, or a few far to the right, are faults of some responses."
    )
    rows = [("mean |Δ|, nats", "responses")]
    rows += [
        (f"{short(low)} to {short(high)}", str(n)) for (low, high), n in zip(ends, count.tolist(), strict=True) if n
    ]
    axes = ("mean |Δ| of the response", "responses")
    return Chart("response", "By response", words, *axes, x_ticks, y_ticks, bars=bars, rows=tuple(rows))


def joint_chart(measured: Measured) -> Chart:
    """Both probabilities of each token, on a scale of log-odds."""
    joint = measured.signature.joint

    def across(cell: float) -> float:
        return round(LEFT + (PLANE_END - LEFT) * cell / LOGIT_CELLS, 1)

    def up(cell: float) -> float:
        return round(FOOT - (FOOT - TOP) * cell / LOGIT_CELLS, 1)

    shade = np.zeros(joint.shape, np.int64)
    some = joint > 0
    shade[some] = np.ceil(SHADES * (1 + np.log(joint[some])) / (1 + np.log(joint.max()))).astype(np.int64)
    width, height = (PLANE_END - LEFT) / LOGIT_CELLS, (FOOT - TOP) / LOGIT_CELLS
    cells = tuple(
        "".join(
            f"M{across(column)} {up(row)}h{width:.2f}v-{height:.2f}h-{width:.2f}z" for row, column in _where(shade == n)
        )
        for n in range(1, SHADES + 1)
    )
    odds = [(label, math.log(float(label)) - math.log1p(-float(label))) for label in ODDS_TICKS]
    places = [(label, (value + LOGIT_EDGE) * LOGIT_CELLS / (2 * LOGIT_EDGE)) for label, value in odds]
    words = (
        "Tokens by both probabilities, in log-odds; darker: more tokens. Noise on the logits makes a band of the same "
        "width around the diagonal. A band that turns is another temperature; a second cloud is a fault of some tokens."
    )
    rows = [("π_infer about", "π_train about", "tokens")]
    most = sorted(_where(joint > 0), key=lambda cell: -joint[cell])[:12]
    rows += [(_odds_label(column), _odds_label(row), f"{joint[row, column]:.0f}") for row, column in most]
    return Chart(
        "joint", "Both probabilities", words, "π_infer", "π_train",
        tuple(Tick(across(place), label.replace("0.000001", "1e-6")) for label, place in places),
        tuple(Tick(up(place), label.replace("0.000001", "1e-6")) for label, place in places),
        cells=cells, law=f"M{LEFT} {FOOT}L{PLANE_END} {TOP}", rows=tuple(rows),
    )  # fmt: skip


def _odds_label(cell: int) -> str:
    odds = (cell + 0.5) * 2 * LOGIT_EDGE / LOGIT_CELLS - LOGIT_EDGE
    return f"{1 / (1 + math.exp(-odds)):.6g}"


def _where(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    return [(int(row), int(column)) for row, column in np.argwhere(chosen)]


# --- means with intervals ------------------------------------------------------------------------------


def _ratio(above_S: FloatArray, below_S: FloatArray, chosen_S: NDArray[np.bool_]) -> Interval:
    return ratio_interval(above_S[chosen_S], below_S[chosen_S], np.arange(chosen_S.sum()))


def _means(above_GB: FloatArray, below_GB: FloatArray, x: Sequence[float]) -> tuple[list[float], list[Interval]]:
    """The bins with at least FEWEST_IN_A_BIN, or else with any: where they lie, and their means."""
    groups, tokens_B = np.arange(len(above_GB)), below_GB.sum(axis=0)
    some = np.flatnonzero(tokens_B >= min(FEWEST_IN_A_BIN, tokens_B.max())).tolist()
    return [x[i] for i in some], [ratio_interval(above_GB[:, i], below_GB[:, i], groups) for i in some]


def _over_rest(measured: Measured, name: str) -> tuple[list[float], list[Interval]]:
    """The means of a sum over the bins of −log π_train, at the bins' mean 1 − π_train."""
    tokens, rest = (measured.bins[part].sum(axis=0) for part in ("tokens", "rest"))
    x = np.divide(rest, tokens, out=np.zeros(len(NATS_EDGES) - 1), where=tokens > 0)
    assert len(measured.bins[name]) == SEQUENCE_GROUPS
    return _means(measured.bins[name], measured.bins["tokens"], x.tolist())


# --- drawing -------------------------------------------------------------------------------------------


def _axis(values: Sequence[float], start: float, end: float) -> tuple[Place, tuple[Tick, ...]]:
    return magnitude_axis(values, start, end) or linear_axis(values, start, end, lambda value: f"{value:g}")


def _dots(
    name: str,
    title: str,
    words: str,
    axes: tuple[str, str],
    x: Sequence[float],
    means: Sequence[Interval],
    *,
    law: Sequence[tuple[float, float]] = (),
    zero: bool = False,
    logs: bool = True,
) -> Chart:
    """Means over x with their intervals; nats."""
    plain: Callable[[float], str] = lambda value: f"{value:g}"  # noqa: E731
    x_at, x_ticks = _axis(x, LEFT, PLANE_END) if logs else linear_axis(x, LEFT, PLANE_END, plain, whole=True)
    y = [one.mean for one in means] + [y for _, y in law] + ([0.0] if zero else [])
    # An interval may reach below 0, where a size has no place: it is cut below the smallest mean.
    floor = -math.inf if zero else min(y) / 2
    ends = [max(floor, end) for one in means for end in (one.low, one.high) if math.isfinite(end)]
    y_at, y_ticks = linear_axis(y + ends, FOOT, TOP, lambda v: f"{v:.2g}") if zero else _axis(y + ends, FOOT, TOP)
    points = []
    rows = [(axes[0], f"{axes[1]}, nats", "interval")]
    for place, one in zip(x, means, strict=True):
        low, high = (one.low, one.high) if math.isfinite(one.low) else (one.mean, one.mean)
        interval = f"{short(low)} to {short(high)}" if math.isfinite(one.low) else ""
        rows.append((short(place), short(one.mean), interval))
        mean_y, low_y, high_y = (round(y_at(max(floor, value)), 1) for value in (one.mean, low, high))
        tip = f"{axes[0]} {short(place)}: {short(one.mean)} [{interval}]"
        points.append(Dot(round(x_at(place), 1), mean_y, low_y, high_y, tip))
    line = "M" + "L".join(f"{x_at(a):.1f} {y_at(max(floor, b)):.1f}" for a, b in law) if law else ""
    if zero:
        line = f"M{LEFT} {y_at(0.0):.1f}H{PLANE_END}"
    return Chart(name, title, words, *axes, x_ticks, y_ticks, tuple(points), law=line, rows=tuple(rows))
