"""Numbers as text."""

import math

import numpy as np

from tailrl.page_parts.number_text import percent, points, scientific, short, spread
from tailrl.stats.intervals import Interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference

NAN = math.nan
ABOVE, SINGLE = Difference(0.05, 0.01, 0.09, 0.02, 3), Difference(0.05, NAN, NAN, NAN, 1)


def test_numbers_in_words() -> None:
    assert percent(Interval(0.5, NAN, NAN, 1)) == "50.0 %"
    assert percent(Interval(0.9, 0.7, 1.1, 3)) == "90.0 % [70.0, 100.0]"
    assert points(ABOVE) == "+5.0 [+1.0, +9.0]"
    assert points(SINGLE) == "+5.0"
    assert points(NO_DIFFERENCE) == ""
    assert [short(x) for x in (0.00123, 12.3, 312.4, math.inf)] == ["0.0012", "12", "312", "inf"]
    assert [scientific(x) for x in (1e-4, 1.7e-4, 3.04e-5, 9.96e-4, 2.0, 0.0)] == [
        *("1e-4", "1.7e-4", "3e-5", "1e-3", "2e0", "0e0")
    ]
    assert spread(np.array([0.1, 0.3, NAN])) == "0.2 (0.1 to 0.3)"
    assert spread(np.array([0.5])) == "0.5"
    assert spread(np.array([NAN])) == "not recorded"
