"""How many seeds a difference between two arms needs, and what the seeds at hand could have seen.

Both are of Welch's two-sided test over seeds at LEVEL. The variances are those seen, so that with a
handful of seeds either number is a rough one.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from tailrl.stats.intervals import UPPER

POWER = 0.8
"""The chance of seeing a difference that is there, by which both numbers go."""

MOST = 1_000
"""Seeds an arm beyond which nobody counts."""

_NODES = 32
"""Quantiles at which the distribution of a variance is looked at."""


def welch_power(effect: float, squares: tuple[float, float], sizes: tuple[int, int]) -> float:
    """The chance that Welch's test finds a true difference between normal scores.

    By quadrature over the two variances that the seeds could have shown, on which both the standard error and the
    degrees of freedom depend. The usual noncentral t takes these as known: with three seeds an arm it promises 0.80
    where the test has 0.70.

    Args:
        effect: the true difference.
        squares: the true variance of each arm's scores, not both 0.
        sizes: seeds in each arm, from 2 on.
    """
    true = math.sqrt(squares[0] / sizes[0] + squares[1] / sizes[1])
    shares_Q = (np.arange(_NODES) + 0.5) / _NODES
    first_Q, second_Q = (
        square / size * stats.chi2.ppf(shares_Q, size - 1) / (size - 1)
        for square, size in zip(squares, sizes, strict=True)
    )
    seen_QQ = first_Q[:, None] + second_Q
    freedom_QQ = seen_QQ**2 / (first_Q[:, None] ** 2 / (sizes[0] - 1) + second_Q**2 / (sizes[1] - 1))
    reach_QQ = stats.t.ppf(UPPER, freedom_QQ) * np.sqrt(seen_QQ)
    found_QQ = stats.norm.sf((reach_QQ - effect) / true) + stats.norm.cdf((-reach_QQ - effect) / true)
    return float(found_QQ.mean())


def seeds_needed(first_S: ArrayLike, second_S: ArrayLike) -> float:
    """Seeds in each arm with which the difference seen, were it the true one, is found with probability POWER.

    Args:
        first_S: (S,), one score a seed; any unit.
        second_S: (S',), the other arm's.

    Returns:
        A whole number, inf where it is more than MOST, NaN where an arm has a single seed or nothing varies at all.
    """
    effect, squares = _effect(first_S, second_S)
    if math.isnan(effect) or not (effect or sum(squares)):
        return math.nan
    if not effect:
        return math.inf
    if not sum(squares):
        return 2.0
    if welch_power(effect, squares, (MOST, MOST)) < POWER:
        return math.inf
    low, high = 1, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if welch_power(effect, squares, (middle, middle)) >= POWER else (middle, high)
    return float(high)


def least_effect(first_S: ArrayLike, second_S: ArrayLike) -> float:
    """The smallest true difference that the seeds at hand would have found with probability POWER.

    Args:
        first_S: (S,), one score a seed; any unit, which the result has too.
        second_S: (S',), the other arm's.

    Returns:
        NaN where no seed differs from another, or an arm has a single one.
    """
    _, squares = _effect(first_S, second_S)
    sizes = np.size(first_S), np.size(second_S)
    if any(math.isnan(square) for square in squares):
        return math.nan
    error = math.sqrt(squares[0] / sizes[0] + squares[1] / sizes[1])
    if not error:
        return math.nan
    # Two seeds an arm and one of them without variance, the worst case, need 18 standard errors.
    return float(optimize.brentq(lambda effect: welch_power(effect, squares, sizes) - POWER, 0.0, 40 * error))


def _effect(first_S: ArrayLike, second_S: ArrayLike) -> tuple[float, tuple[float, float]]:
    """The size of the difference and both variances; NaN where a single seed has none."""
    arms = [np.asarray(scores, dtype=np.float64) for scores in (first_S, second_S)]
    if min(scores.size for scores in arms) < 2:
        return math.nan, (math.nan, math.nan)
    return abs(float(arms[0].mean() - arms[1].mean())), (float(arms[0].var(ddof=1)), float(arms[1].var(ddof=1)))
