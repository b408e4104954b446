"""The axes of magnitudes: which scale shows them, and its ticks."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

LINEAR_PART = 0.5
"""The length of the linear part of a magnitude axis, on each side of 0, in decades."""

_SMALLEST_OF_LARGEST = 1e-8
"""Magnitudes below this share of the largest are rounding; a log axis leaves them out."""


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


def tick_label(value: float) -> str:
    """A tick in few characters: 0, 1e-5, -2e-4."""
    if value == 0:
        return "0"
    mantissa, power = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(power)}"
