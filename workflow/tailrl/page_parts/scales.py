"""The axes of charts: where a value lies, and the ticks. Lengths are in the units of a box as wide as a phone."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LINEAR_PART = 0.5
"""The length of the linear part of a magnitude axis, on each side of 0, in decades."""

_SMALLEST_OF_LARGEST = 1e-8
"""Magnitudes below this share of the largest are rounding; a log axis leaves them out."""

WIDTH_OF_PHONE, CURVES_HEIGHT = 360, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 38
"""The margins of a chart of curves; the axes' labels lie in them."""

Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


class MagnitudeAxis(NamedTuple):
    """A log axis, or, with a threshold, one that is linear up to it and logarithmic beyond, on either side of 0.

    Attributes:
        ticks: powers of ten, or also their multiples by 2 and 5; all are positive, 0, or negative.
        plain: whether ticks are written as plain numbers.
    """

    threshold: float | None
    ticks: list[float]
    plain: bool


def magnitudes(values: Iterable[float]) -> MagnitudeAxis | None:
    """The axis for magnitudes; None for a linear one.

    An exact zero is a result (no mismatch) and must be visible, which a log axis does not allow. Values within a
    decade, and zeros alone, keep a linear axis.
    """
    known = np.array([value for value in values if math.isfinite(value)])
    nonzero = np.abs(known[known != 0])
    if not nonzero.size:
        return None
    largest = float(nonzero.max())
    smallest = max(float(nonzero.min()), largest * _SMALLEST_OF_LARGEST)
    if known.min() > 0 and largest < 10 * smallest:
        return None
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest))
    ticks = [10.0**power for power in range(low, high + 1, max(1, math.ceil((high - low) / 4)))]
    plain = low >= -2 and high <= 4
    if known.min() > 0:
        if largest < 100 * smallest:  # decades alone could be a single tick
            ticks = [m * 10.0**power for power in range(low, high + 1) for m in (1, 2, 5)]
        return MagnitudeAxis(None, ticks, plain)
    negative = [-tick for tick in ticks] if known.min() < -(10.0**low) else []
    return MagnitudeAxis(10.0**low, [*negative[::-1], 0.0, *ticks], plain)


def linear_axis(
    values: Sequence[float],
    start: float,
    end: float,
    label: Callable[[float], str],
    *,
    limits: tuple[float, float] = (-math.inf, math.inf),
    whole: bool = False,
) -> tuple[Place, tuple[Tick, ...]]:
    """A linear axis from `start` to `end` around the values, within limits, and its ticks."""
    low, high = min(values), max(values)
    margin = 0.0 if whole else 0.06 * (high - low or abs(high) or 1.0)
    low, high = max(limits[0], low - margin), min(limits[1], high + margin)
    span = high - low or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if span / (m * unit) <= 5)
    step = max(1.0, math.ceil(step)) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)

    def at(value: float) -> float:
        return start + (end - start) * (value - low) / span

    return at, tuple(Tick(round(at(n * step), 1), label(round(n * step, 12))) for n in range(first, last + 1))


def magnitude_axis(values: Sequence[float], start: float, end: float) -> tuple[Place, tuple[Tick, ...]] | None:
    """The axis of `magnitudes`, as matplotlib draws it; None where that is linear."""
    scale = magnitudes(values)
    if scale is None:
        return None

    def grown(value: float) -> float:
        if scale.threshold is None:
            return math.log10(value)
        size = abs(value) / scale.threshold
        decades = LINEAR_PART * size if size <= 1 else LINEAR_PART + math.log10(size)
        return math.copysign(decades, value)

    floor = scale.ticks[0] * 1e-3 if scale.threshold is None else -math.inf
    low, high = grown(max(min(values), floor)), grown(max(values))
    margin = 0.05 * (high - low or 1.0)
    low, high = low - margin, high + margin

    def at(value: float) -> float:
        return start + (end - start) * (grown(max(value, floor)) - low) / (high - low)

    label = plain_number if scale.plain else power_label
    return at, tuple(Tick(round(at(t), 1), label(t)) for t in scale.ticks if low <= grown(t) <= high)


def plain_number(value: float) -> str:
    return f"{value:g}"


def power_label(value: float) -> str:
    """A tick in few characters: 0, 1e-5, -2e-4."""
    if value == 0:
        return "0"
    mantissa, power = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(power)}"
