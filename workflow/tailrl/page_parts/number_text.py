"""Numbers as text: percentages, points, intervals, p values."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.stats.intervals import Interval

if TYPE_CHECKING:  # it needs SciPy
    from tailrl.stats.tests import Difference

LOST = "1 − Z"


def with_interval(of: "Interval | Difference", number: Callable[[float], str] = "{:.3g}".format) -> str:
    """A number with its interval, if there is one."""
    return number(of.mean) if math.isnan(of.low) else f"{number(of.mean)} [{number(of.low)}, {number(of.high)}]"


def percent(interval: Interval) -> str:
    """A share of 1 in percent, with its interval if there is one."""
    if math.isnan(interval.low):
        return f"{100 * interval.mean:.1f} %"
    low, high = max(0.0, interval.low), min(1.0, interval.high)  # a t interval of few seeds can leave [0, 1]
    return f"{100 * interval.mean:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def percent_of(share: float) -> str:
    """A share of 1 in percent; empty for NaN."""
    return "" if math.isnan(share) else f"{100 * share:.1f} %"


def points(difference: "Interval | Difference") -> str:
    """A difference of shares in percentage points, with its interval if there is one; empty without a difference."""
    if math.isnan(difference.mean):
        return ""
    return with_interval(difference, lambda value: f"{100 * value:+.1f}")


def count(number: int, noun: str) -> str:
    """A number and its noun, in the plural except for 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(value: float) -> str:
    """Two significant digits, or whole numbers from a hundred on."""
    return f"{value:.2g}" if not math.isfinite(value) or abs(value) < 100 else f"{value:.0f}"


def scientific(value: float) -> str:
    """A learning rate in two significant digits, as 1e-4 or 1.7e-4."""
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def spread(values_S: FloatArray) -> str:
    """The mean over seeds with the smallest and largest seed, or `not recorded`."""
    known = values_S[~np.isnan(values_S)]
    if not known.size:
        return "not recorded"
    mean, low, high = (short(float(v)) for v in (known.mean(), known.min(), known.max()))
    return mean if low == high else f"{mean} ({low} to {high})"


def p_value(p: float) -> str:
    """p with three digits; empty for NaN."""
    if math.isnan(p):
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
