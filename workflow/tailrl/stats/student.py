"""Student's t distribution, so that an interval needs no SciPy."""

import math
from functools import cache

TINY = 1e-300  # in place of 0 in a denominator of the continued fraction
PRECISION = 1e-16  # relative; where the continued fraction ends
MOST_TERMS = 10_000


def t_cdf(t: float, df: float) -> float:
    """P(T ≤ t) for Student's t with df > 0 degrees of freedom, by the regularised incomplete beta function."""
    upper_tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - upper_tail if t >= 0 else upper_tail


@cache
def t_quantile(p: float, df: float) -> float:
    """The t with P(T ≤ t) = p, for 0.5 ≤ p < 1 and df > 0, to about 13 digits.

    Example:
        >>> round(t_quantile(0.975, 10), 6)
        2.228139
    """
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, 2 * high
    while high - low > 4e-16 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), which converges fast below the mean."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Lentz's method: the fraction from above, as a product of ratios of its numerators and denominators.
    numerator, denominator = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or TINY)
    value = denominator
    for m in range(1, MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            denominator = 1 / ((1 + coefficient * denominator) or TINY)
            numerator = (1 + coefficient / numerator) or TINY
            value *= numerator * denominator
        if abs(numerator * denominator - 1) < PRECISION:
            break
    return math.exp(log_front) * value / a
