"""The shape of a curve of the mismatch: flat, a jump, spikes, a sawtooth, growth that ends or goes on, or uneven.

Sizes are compared as factors, so all arithmetic is on logarithms. A value of 0 or below has no logarithm; it is taken
for the smallest positive value of the curve, but a stretch of such values is not flat.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray

FEWEST = 12  # points that a shape needs
WINDOW = 11  # points of a running median
LEAST_FACTOR = math.log(1.5)  # a level that changes by less is the same level
SPIKE_FACTOR = math.log(3.0)  # a spike is at least so many times its surroundings
SPIKE_NOISE = 6.0  # and at least so many standard deviations of the noise above them
LONGEST_SPIKE = 3  # points
JUMP_NOISE = 5.0  # a jump is at least so many standard deviations of the noise
JUMP_SHARE = 0.6  # of the whole change, within JUMP_POINTS on either side
JUMP_POINTS = 4
BLOCKS = 20  # parts of a curve whose means are compared for a trend
LEAST_TAU = 0.5  # Kendall's tau of the parts' order with their means: growth, not noise
TEETH = 4  # resets that make a sawtooth
EVEN = 0.35  # how much the lengths of teeth may vary: standard deviation by mean
RESET_NOISE = 5.0  # a reset is at least so many standard deviations of the noise
TEETH_SHARE = 0.5  # of the curve, that the teeth must cover
STRETCHES = (3, 6, 12, 24, 48)  # points of the windows whose medians must all be near the curve's own, if it is flat
START = 0.05  # of the curve: its beginning, where a rise may be over within a tenth


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a curve.

    Attributes:
        name: a key of `shapes.yaml`.
        level: the median value, the start's where the level changes. end: the median of the last tenth.
        factor: how many times its start the end is (of a jump: the level after by the level before).
        since: the step where a jump happened, where growth began to show, or where an uneven curve first lies
            elsewhere; NaN for other shapes. until: the last step where an uneven curve lies elsewhere.
        spikes: the steps of spikes.
        period: steps between two resets of a sawtooth; NaN for other shapes.
    """

    name: str
    level: float
    end: float
    factor: float
    since: float = math.nan
    spikes: tuple[float, ...] = ()
    period: float = math.nan
    until: float = math.nan


@dataclass(frozen=True, slots=True)
class _Points:
    """Points of a curve: its steps, the logarithms of its values, and the noise's standard deviation."""

    step_N: FloatArray
    log_N: FloatArray
    noise: float = field(default=0.0)


def shape_of(step_N: FloatArray, value_N: FloatArray) -> Shape:
    """The shape of a curve of N points, in the order of its steps. Values that are not finite are left out."""
    finite_N = np.isfinite(value_N) & np.isfinite(step_N)
    step_N, value_N = step_N[finite_N], value_N[finite_N]
    if not len(value_N) or not (value_N > 0).any():
        return Shape("zero" if len(value_N) else "unknown", 0.0, 0.0, 1.0)
    log_N = np.log(np.maximum(value_N, value_N[value_N > 0].min()))
    whole = _Points(step_N, log_N, _noise(log_N))
    if len(log_N) < FEWEST:
        return _shape("short", whole, _tenths(log_N))
    spike_N = _spikes(whole)
    spikes = tuple(step_N[spike_N].tolist())
    rest = _Points(step_N[~spike_N], log_N[~spike_N], _noise(log_N[~spike_N]))
    if (period := _sawtooth(rest)) is not None:
        return _shape("sawtooth", rest, _tenths(rest.log_N), spikes=spikes, period=period)
    if (place := _jump(rest)) is not None:
        levels = float(np.median(rest.log_N[:place])), float(np.median(rest.log_N[place:]))
        name = "jump" if levels[1] > levels[0] else "drop"
        return _shape(name, rest, levels, since=float(rest.step_N[place]), spikes=spikes)
    start, end = _tenths(rest.log_N)
    tau = _kendall(rest.log_N)
    if abs(end - start) >= LEAST_FACTOR and tau * np.sign(end - start) >= LEAST_TAU:
        if end < start:
            return _shape("fall", rest, (start, end), since=_shows(rest, start), spikes=spikes)
        name = "growth" if _goes_on(rest, end - start) else "rise"
        return _shape(name, rest, (start, end), since=_shows(rest, start), spikes=spikes)
    if (begin := _early_rise(rest)) is not None:
        return _shape("rise", rest, (begin, end), since=_shows(rest, begin), spikes=spikes)
    is_none_N = value_N[~spike_N] <= 0
    median = float(np.median(rest.log_N[~is_none_N]))
    away_N = _away(rest, is_none_N, median)
    if away_N.any():
        places = np.flatnonzero(away_N)
        farthest = -math.inf if is_none_N[places].all() else float(max(rest.log_N[places] - median, key=abs))
        first, last = (float(rest.step_N[place]) for place in (places[0], places[-1]))
        return replace(_shape("uneven", rest, (median, median + farthest), first, spikes), until=last)
    name = "spikes" if spikes else "flat"
    return _shape(name, rest, (median, median), spikes=spikes)


def _shape(
    name: str,
    points: _Points,
    levels: tuple[float, float],
    since: float = math.nan,
    spikes: tuple[float, ...] = (),
    period: float = math.nan,
) -> Shape:
    _, end = _tenths(points.log_N)
    level, after = levels
    return Shape(name, math.exp(level), math.exp(end), math.exp(after - level), since, spikes, period)


def _noise(log_N: FloatArray) -> float:
    """The standard deviation of independent noise on a slow curve: from the middle size of neighbours' differences."""
    return float(1.4826 * np.median(np.abs(np.diff(log_N))) / math.sqrt(2)) if len(log_N) > 1 else 0.0


def _tenths(log_N: FloatArray) -> tuple[float, float]:
    """The medians of the first and the last tenth."""
    part = max(1, len(log_N) // 10)
    return float(np.median(log_N[:part])), float(np.median(log_N[-part:]))


def _spikes(points: _Points) -> NDArray[np.bool_]:
    """Which points stand out above both sides, for at most LONGEST_SPIKE points."""
    log_N, half = points.log_N, WINDOW // 2
    around_N = np.array([np.median(log_N[max(0, i - half) : i + half + 1]) for i in range(len(log_N))])
    high_N: NDArray[np.bool_] = log_N - around_N > max(SPIKE_NOISE * points.noise, SPIKE_FACTOR)
    starts = np.flatnonzero(high_N & ~np.concatenate([[False], high_N[:-1]]))
    for start in starts:
        end = start + int(np.argmin(np.append(high_N[start:], False)))
        if end - start > LONGEST_SPIKE or end == len(log_N):  # at the very end nothing says that it comes back
            high_N[start:end] = False
    return high_N


def _away(points: _Points, is_none_N: NDArray[np.bool_], median: float) -> NDArray[np.bool_]:
    """Which points lie elsewhere than the curve's median, in a window whose own median does so against the noise."""
    away_N = np.zeros(len(points.log_N), bool)
    log_N = np.where(is_none_N, -math.inf, points.log_N)
    for length in STRETCHES:
        if length > len(log_N) // 2:
            break
        apart_W = np.median(sliding_window_view(log_N, length), axis=1) - median
        least = max(LEAST_FACTOR, SPIKE_NOISE * points.noise / math.sqrt(length))
        for begin in np.flatnonzero(np.abs(apart_W) >= least):
            part_N = np.sign(apart_W[begin]) * (log_N[begin : begin + length] - median)
            away_N[begin : begin + length] |= part_N >= LEAST_FACTOR
    return away_N


def _jump(points: _Points) -> int | None:
    """The first point of a new level: the split that leaves the least squares, if the change happens there at once."""
    log_N = points.log_N
    edge = max(3, len(log_N) // 10)  # what changes sooner belongs to the beginning: `_early_rise`
    places = np.arange(edge, len(log_N) - edge)
    sums, squares = np.cumsum(log_N), np.cumsum(log_N**2)
    left_N = squares[places - 1] - sums[places - 1] ** 2 / places
    after_N = len(log_N) - places
    right_N = squares[-1] - squares[places - 1] - (sums[-1] - sums[places - 1]) ** 2 / after_N
    place = int(places[np.argmin(left_N + right_N)])
    change = float(np.median(log_N[place:]) - np.median(log_N[:place]))
    near = min(JUMP_POINTS, place, len(log_N) - place)
    local = float(np.median(log_N[place : place + near]) - np.median(log_N[place - near : place]))
    least = max(LEAST_FACTOR, JUMP_NOISE * points.noise / math.sqrt(near))
    return place if abs(change) >= least and local / change >= JUMP_SHARE else None


def _sawtooth(points: _Points) -> float | None:
    """The steps between two resets, where the curve rises and falls back again and again at even distances."""
    log_N = points.log_N
    fall_N = -np.diff(log_N)
    least = max(LEAST_FACTOR, RESET_NOISE * points.noise)
    resets = np.flatnonzero(fall_N >= least) + 1
    if len(resets) < TEETH:
        return None
    lengths = np.diff(resets)
    if lengths.min() < 3 or lengths.std() > EVEN * lengths.mean() or lengths.sum() < TEETH_SHARE * len(log_N):
        return None
    # Between two resets it rises: the point before a reset is higher than the point behind the last one.
    rises = [log_N[end - 1] - log_N[begin] for begin, end in itertools.pairwise(resets)]
    if np.median(rises) < LEAST_FACTOR:
        return None
    return float(np.median(np.diff(points.step_N[resets])))


def _kendall(log_N: FloatArray) -> float:
    """Kendall's tau between order and value, over BLOCKS means: neighbouring points of a run are not independent."""
    means = np.array([part.mean() for part in np.array_split(log_N, min(BLOCKS, len(log_N) // 2))])
    order = np.sign(means[None] - means[:, None])
    pairs = len(means) * (len(means) - 1) / 2
    return float(np.triu(order, 1).sum() / pairs)


def _early_rise(points: _Points) -> float | None:
    """The level of the first points, where a rise from it was over too soon to be a trend of the whole curve."""
    count = max(4, round(START * len(points.log_N)))
    begin = float(np.median(points.log_N[:count]))
    middle = float(np.median(points.log_N[2 * count :]))
    least = max(LEAST_FACTOR, JUMP_NOISE * points.noise / math.sqrt(count))
    return begin if middle - begin >= least else None


def _goes_on(points: _Points, whole: float) -> bool:
    """Whether a growing curve still grows in its last third: by a tenth of the whole growth or more, against noise."""
    third = points.log_N[-(len(points.log_N) // 3) :]
    half = len(third) // 2
    gain = float(np.median(third[half:]) - np.median(third[:half]))
    return gain >= max(0.05 * whole, 2 * points.noise * math.sqrt(math.pi / half))


def _shows(points: _Points, start: float) -> float:
    """The first step from which half of a window lies beyond the start's level by more than LEAST_FACTOR."""
    log_N, half = points.log_N, WINDOW // 2
    for place in range(len(log_N)):
        around = np.median(log_N[max(0, place - half) : place + half + 1])
        if abs(around - start) >= LEAST_FACTOR:
            return float(points.step_N[place])
    return float(points.step_N[-1])
