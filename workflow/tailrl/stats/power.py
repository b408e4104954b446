"""The power of a test, the seeds that a difference between two arms needs, and the smallest that given seeds detect.

The last two are for Welch's two-sided test over seeds at LEVEL. They use the observed variances, so that with few seeds
both are rough.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from tailrl.stats.intervals import UPPER

POWER = 0.8
"""The probability with which a true difference is to be detected."""

MOST = 1_000
"""The largest number of seeds per arm that is searched."""

_NODES = 32
"""Quadrature nodes (quantiles) of the distribution of a variance."""


def welch_power(effect: float, squares: tuple[float, float], sizes: tuple[int, int]) -> float:
    """The power of Welch's test for a true difference between normal scores.

    Standard error and degrees of freedom depend on the two sample variances, which are integrated out by quadrature.
    The usual noncentral t takes them as known: with three seeds per arm it promises a power of 0.80, and the test has
    0.70.

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


def paired_power(effect: float, spread: float, pairs: int, tests: int = 1) -> float:
    """The power of a paired t test for a true mean difference, where differences are normal.

    Args:
        effect: the true mean difference.
        spread: the true standard deviation of the differences, above 0.
        pairs: how many, from 2 on.
        tests: Holm's correction of the smallest p among so many.
    """
    reach = float(stats.t.ppf(1 - (1 - UPPER) / tests, pairs - 1))
    shares_Q = (np.arange(_NODES**2) + 0.5) / _NODES**2
    error_Q = np.sqrt(stats.chi2.ppf(shares_Q, pairs - 1) / (pairs - 1))
    shift = effect / spread * math.sqrt(pairs)
    return float((stats.norm.sf(reach * error_Q - shift) + stats.norm.cdf(-reach * error_Q - shift)).mean())


def seeds_needed(first_S: ArrayLike, second_S: ArrayLike) -> float:
    """Seeds per arm to detect a true difference of the observed size with probability POWER; inf beyond MOST.

    Each arm has one score per seed, (S,) and (S',), any unit. NaN if an arm has a single seed or all scores are equal.
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
    """The smallest true difference that these seeds detect with probability POWER, in the scores' unit.

    Each arm has one score per seed, (S,) and (S',). NaN if an arm has a single seed, or neither arm's scores vary.
    """
    _, squares = _effect(first_S, second_S)
    sizes = np.size(first_S), np.size(second_S)
    error = math.sqrt(squares[0] / sizes[0] + squares[1] / sizes[1])
    if math.isnan(error) or not error:
        return math.nan
    # The worst case is two seeds per arm, one arm without variance: 18 standard errors.
    return float(optimize.brentq(lambda effect: welch_power(effect, squares, sizes) - POWER, 0.0, 40 * error))


def _effect(first_S: ArrayLike, second_S: ArrayLike) -> tuple[float, tuple[float, float]]:
    """The absolute difference and both variances; NaN where an arm has a single seed."""
    arms = [np.asarray(scores, dtype=np.float64) for scores in (first_S, second_S)]
    if min(scores.size for scores in arms) < 2:
        return math.nan, (math.nan, math.nan)
    return abs(float(arms[0].mean() - arms[1].mean())), (float(arms[0].var(ddof=1)), float(arms[1].var(ddof=1)))
