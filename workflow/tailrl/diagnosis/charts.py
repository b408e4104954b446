"""The charts of a diagnosis, with the numbers behind each."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path as PathOfCell
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.measure import LOGIT_CELLS, NATS_EDGES, POSITION_EDGES, Measured
from tailrl.diagnosis.signals import LOGIT_EDGE
from tailrl.page_parts.drawing import LAW, MARK, PAGE, chart, in_page, set_magnitudes
from tailrl.page_parts.number_text import short
from tailrl.runtime.data_files import models_beside
from tailrl.stats.intervals import Interval, ratio_interval

MOST_BARS = 24  # bins of responses, by mean |Δ| or by step
SHADES = 6  # of the joint picture: each is a factor in the number of tokens
ODDS_TICKS = ("1e-6", "0.001", "0.5", "0.999", "0.999999")

DASHED = (0, (4, 2.5))

FEWEST_IN_A_BIN = 10  # a bin with fewer is not drawn: it says nothing, and would set the scale


class ChartWords(Record):
    """What `charts.yaml` says of a chart."""

    title: str
    across: str
    up: str
    words: str


@cache
def chart_words() -> dict[str, ChartWords]:
    """The words of each chart, by its name."""
    return models_beside(__file__, "charts.yaml", ChartWords)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of points with intervals, of bars or of shaded cells.

    `svg` is its <svg> element. `rows` are the numbers behind it; the first is the header. `nats`: whether what goes up
    is in nats.
    """

    name: str
    said: ChartWords
    svg: str
    rows: tuple[tuple[str, ...], ...]
    nats: bool = False


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
    one = _dots("size", x, means, law=law)
    words = one.said.words.format(law=short(total))
    return replace(one, said=one.said.model_copy(update={"words": words}))


def sign_chart(measured: Measured) -> Chart:
    """Mean Δ against 1 − p: which side gives a token more."""
    x, means = _over_rest(measured, "signed")
    return _dots("sign", x, means, zero=True)


def position_chart(measured: Measured) -> Chart:
    """Mean |Δ| by the token's place in its response."""
    sums = measured.positions
    x, means = _means(sums["size"], sums["tokens"], [float(edge) + 1 for edge in POSITION_EDGES[:-1]])
    return _dots("position", x, means)


def length_chart(measured: Measured) -> Chart:
    """Mean |Δ| of a token by the length of its response."""
    tokens_S, size_S = measured.column("tokens"), measured.column("abs_logp")
    power_S = np.floor(np.log2(np.maximum(tokens_S, 1))).astype(np.int64)
    names = np.unique(power_S[tokens_S > 0])
    means = [_ratio(size_S, tokens_S, (power_S == power) & (tokens_S > 0)) for power in names]
    return _dots("length", [2.0**n for n in names], means)


def step_chart(measured: Measured) -> Chart | None:
    """Mean |Δ| of a token by training step; None if the log has fewer than two steps."""
    tokens_S, size_S, step_S = (measured.column(name) for name in ("tokens", "abs_logp", "step"))
    known_S = np.isfinite(step_S) & (tokens_S > 0)
    steps = np.unique(step_S[known_S])
    if len(steps) < 2:
        return None
    parts = np.array_split(steps, min(len(steps), MOST_BARS))
    means = [_ratio(size_S, tokens_S, known_S & (step_S >= part[0]) & (step_S <= part[-1])) for part in parts]
    return _dots("step", [float(part.mean()) for part in parts], means, logs=False)


def response_chart(measured: Measured) -> Chart:
    """How many responses have which mean |Δ|."""
    tokens_S = measured.column("tokens")
    mean_S = measured.column("abs_logp")[tokens_S > 0] / tokens_S[tokens_S > 0]
    size_S = np.log10(np.maximum(mean_S, 1e-9))
    edges = np.linspace(size_S.min(), max(size_S.max(), size_S.min() + 0.1), MOST_BARS + 1)
    count, _ = np.histogram(size_S, edges)
    ends = [(10**low, 10**high) for low, high in itertools.pairwise(edges.tolist())]
    bins = [(low, high, int(n)) for (low, high), n in zip(ends, count, strict=True) if n]
    said = chart_words()["response"]
    marks = {}
    with chart(said.across) as (figure, plane):
        for number, (low, high, n) in enumerate(bins):
            plane.bar(low, n, high - low, align="edge", color=MARK, edgecolor=PAGE, linewidth=0.6, gid=f"bar{number}")
            marks[f"bar{number}"] = {"title": f"{short(low)} to {short(high)} nats: {n}"}
        set_magnitudes(plane.xaxis, [ends[0][0], ends[-1][1]])
        plane.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        svg = in_page(figure, "response", _label(said), marks)
    rows = [("mean |Δ|, nats", "responses")]
    rows += [(f"{short(low)} to {short(high)}", str(n)) for low, high, n in bins]
    return Chart("response", said, svg, tuple(rows))


def joint_chart(measured: Measured) -> Chart:
    """Both probabilities of each token, on a scale of log-odds."""
    joint = measured.joint
    shade = np.zeros(joint.shape, np.int64)
    some = joint > 0
    shade[some] = np.ceil(SHADES * (1 + np.log(joint[some])) / (1 + np.log(joint.max()))).astype(np.int64)
    odds = [math.log(float(label)) - math.log1p(-float(label)) for label in ODDS_TICKS]
    places = [(value + LOGIT_EDGE) * LOGIT_CELLS / (2 * LOGIT_EDGE) for value in odds]
    said = chart_words()["joint"]
    with chart(said.across) as (figure, plane):
        for n in range(1, SHADES + 1):
            cells = [PathOfCell.unit_rectangle().transformed(Affine2D().translate(column, row))
                     for row, column in _where(shade == n)]  # fmt: skip
            if cells:
                path = PathOfCell.make_compound_path(*cells)
                plane.add_patch(PathPatch(path, facecolor=MARK, alpha=n / SHADES, linewidth=0))
        plane.plot([0, LOGIT_CELLS], [0, LOGIT_CELLS], color=LAW, linestyle=DASHED, linewidth=1.6)
        plane.set(xlim=(0, LOGIT_CELLS), ylim=(0, LOGIT_CELLS))
        plane.set_xticks(places, ODDS_TICKS)
        plane.set_yticks(places, ODDS_TICKS)
        svg = in_page(figure, "joint", _label(said), {})
    rows = [("π_infer about", "π_train about", "tokens")]
    most = sorted(_where(joint > 0), key=lambda cell: -joint[cell])[:12]
    rows += [(_odds_label(column), _odds_label(row), f"{joint[row, column]:.0f}") for row, column in most]
    return Chart("joint", said, svg, tuple(rows))


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
    return _means(measured.bins[name], measured.bins["tokens"], x.tolist())


# --- drawing -------------------------------------------------------------------------------------------


def _label(said: ChartWords) -> str:
    return f"{said.title}: {said.up} over {said.across}; the table below has the numbers"


def _dots(
    name: str,
    x: Sequence[float],
    means: Sequence[Interval],
    *,
    law: Sequence[tuple[float, float]] = (),
    zero: bool = False,
    logs: bool = True,
) -> Chart:
    """Means over x with their intervals; nats."""
    # An interval may reach below 0, where a size has no place: it is cut below the smallest mean.
    drawn = [one.mean for one in means] + [y for _, y in law]
    floor = -math.inf if zero else min(drawn) / 2
    said = chart_words()[name]
    rows, marks = [(said.across, f"{said.up}, nats", "interval")], {}
    with chart(said.across) as (figure, plane):
        for number, (place, one) in enumerate(zip(x, means, strict=True)):
            low, high = (one.low, one.high) if math.isfinite(one.low) else (one.mean, one.mean)
            interval = f"{short(low)} to {short(high)}" if math.isfinite(one.low) else ""
            rows.append((short(place), short(one.mean), interval))
            marks[f"point{number}"] = {"title": f"{said.across} {short(place)}: {short(one.mean)} [{interval}]"}
            ends = [max(floor, low), max(floor, high)]
            plane.plot([place, place], ends, color=MARK, alpha=0.6)
            plane.plot(place, one.mean, "o", color=MARK, markersize=6.8, gid=f"point{number}")
            drawn += ends
        if law:
            plane.plot(*zip(*law, strict=True), color=LAW, linestyle=DASHED, linewidth=1.6)
        if zero:
            plane.axhline(0, color=LAW, linestyle=DASHED, linewidth=1.6)
        if logs:
            set_magnitudes(plane.xaxis, list(x))
        else:
            plane.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if not zero:
            set_magnitudes(plane.yaxis, drawn)
        svg = in_page(figure, name, _label(said), marks)
    return Chart(name, said, svg, tuple(rows), nats=True)
