"""Intervals over seeds and problems against sums written out, and against simulated coverage.

Simulated rates are compared with their nominal value at 3.3 binomial standard errors, as in test_intervals.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tailrl.stats.crossed import crossed_difference, crossed_gain, crossed_interval
from tailrl.stats.intervals import mean_interval

RNG = np.random.default_rng


def covers(rate: float, trials: int, nominal: float = 0.95) -> bool:
    return abs(rate - nominal) < 3.3 * math.sqrt(nominal * (1 - nominal) / trials)


def drawn(rng: np.random.Generator, seeds: int, problem_P: np.ndarray, seed: float, rest: float) -> np.ndarray:
    """Scores with effects of known size, (S, P)."""
    own_S = seed * rng.normal(size=(seeds, 1))
    return own_S + problem_P + rest * rng.normal(size=(seeds, problem_P.size))


def test_the_variance_is_that_of_the_two_way_analysis() -> None:
    """Mean squares by loops, then the three variance components, then the variance of the mean."""
    x = RNG(0).normal(size=(3, 5)) + np.arange(3)[:, None] + np.arange(5)
    mean = x.mean()
    ms_seeds = 5 * sum((row.mean() - mean) ** 2 for row in x) / 2
    ms_problems = 3 * sum((column.mean() - mean) ** 2 for column in x.T) / 4
    cells = itertools.product(range(3), range(5))
    ms_rest = sum((x[s, p] - x[s].mean() - x[:, p].mean() + mean) ** 2 for s, p in cells) / 8
    seeds, problems = (ms_seeds - ms_rest) / 5, (ms_problems - ms_rest) / 3
    variance = seeds / 3 + problems / 5 + ms_rest / 15
    freedom = (15 * variance) ** 2 / (ms_seeds**2 / 2 + ms_problems**2 / 4 + ms_rest**2 / 8)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    found = crossed_interval(x)
    assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-12)
    assert found.n == 3


@pytest.mark.parametrize(
    ("seeds", "problems", "seed", "problem", "rest"),
    [(3, 200, 0.02, 0.3, 0.2), (10, 250, 0.1, 0.3, 0.2), (5, 40, 0.1, 0.1, 0.3), (3, 100, 0.2, 0.1, 0.1)],
)
def test_the_interval_covers(seeds: int, problems: int, seed: float, problem: float, rest: float) -> None:
    rng, trials, covered = RNG(1), 600, 0
    for _ in range(trials):
        found = crossed_interval(0.5 + drawn(rng, seeds, problem * rng.normal(size=problems), seed, rest))
        covered += found.low <= 0.5 <= found.high
    assert covers(covered / trials, trials)


def test_the_interval_covers_shares_of_correct_samples_where_seeds_alone_or_problems_alone_do_not() -> None:
    """Three seeds of four samples on 60 problems whose difficulty varies, as avg@4 is measured."""
    rng, trials = RNG(2), 600
    both = seeds = 0
    for _ in range(trials):
        chance_SP = np.clip(rng.beta(2, 2, 60) + 0.05 * rng.normal(size=(3, 1)), 0, 1)
        score_SP = rng.binomial(4, chance_SP) / 4
        found, alone = crossed_interval(score_SP), mean_interval(score_SP.mean(axis=1))
        both += found.low <= 0.5 <= found.high
        seeds += alone.low <= 0.5 <= alone.high
    assert covers(both / trials, trials)
    assert seeds < both


@pytest.mark.parametrize(
    ("sizes", "seed", "problem"),
    [((3, 3), (0.02, 0.02), 0.1), ((10, 10), (0.1, 0.03), 0.1), ((10, 5), (0.1, 0.02), 0.05)],
)
def test_the_difference_covers_and_holds_its_level(
    sizes: tuple[int, int], seed: tuple[float, float], problem: float
) -> None:
    """Problems of shared difficulty, with another effect of each arm on each problem."""
    rng, trials, covered, rejected = RNG(3), 600, 0, 0
    for _ in range(trials):
        shared_P = rng.normal(size=200)
        first, second = (
            drawn(rng, size, shared_P + problem * rng.normal(size=200), own, 0.2)
            for size, own in zip(sizes, seed, strict=True)
        )
        found = crossed_difference(first + 0.3, second)
        covered += found.low <= 0.3 <= found.high
        rejected += crossed_difference(first, second).p <= 0.05
    assert covers(covered / trials, trials)
    assert covers(rejected / trials, trials, 0.05)


def test_the_error_is_never_below_that_of_seeds_alone_or_problems_alone() -> None:
    """By chance the rest's mean square can exceed the others; the combined variance would be too small."""
    same = RNG(5).normal(size=(1, 50)) + np.zeros((4, 1))  # every seed alike: what is left is the problems' error
    alone, found = mean_interval(same[0]), crossed_interval(same)
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high), rel=1e-9)
    # Rows of equal means and columns of nearly equal ones, around which the cells differ by far more.
    checkered = np.array([[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, -1.0, 1.01]])
    square = max(float(means.var(ddof=1)) / means.size for means in (checkered.mean(axis=0), checkered.mean(axis=1)))
    found = crossed_interval(checkered)
    assert found.high - found.low >= 2 * 1.96 * math.sqrt(square)


@pytest.mark.parametrize("seeds", [2, 3])
def test_few_seeds_cover_and_are_never_surer_than_seeds_alone(seeds: int) -> None:
    rng, trials, covered = RNG(8), 400, 0
    for _ in range(trials):
        problem_P = 0.35 * rng.normal(size=250)
        score_SP = problem_P + 0.03 * rng.normal(size=(seeds, 1)) + 0.2 * rng.normal(size=(seeds, 250))
        found, alone = crossed_interval(score_SP), mean_interval(score_SP.mean(axis=1))
        covered += found.low <= 0 <= found.high
        assert found.high - found.low >= (alone.high - alone.low) * (1 - 1e-9)
    assert covered / trials > 0.94


def test_a_gain_over_a_fixed_policy_has_one_arms_seeds() -> None:
    scores, base = RNG(6).normal(size=(3, 20)), RNG(7).normal(size=20)
    found, wanted = crossed_gain(scores, base), crossed_interval(scores - base)
    assert (found.mean, found.low, found.high, found.n) == (wanted.mean, wanted.low, wanted.high, 3)
    assert 0 < found.p < 1


def test_edges() -> None:
    single = crossed_interval([[0.5, 0.25, 0.75]])
    assert (single.mean, single.n) == (0.5, 1)
    assert math.isnan(single.low)
    assert math.isnan(crossed_difference([[0.5, 0.2]], [[0.1, 0.3], [0.2, 0.2]]).p)
    assert math.isnan(crossed_difference([[0.5], [0.4]], [[0.1], [0.2]]).p)  # a single problem
    right = crossed_interval(np.ones((3, 20)))
    assert (right.mean, right.high) == (1.0, 1.0)
    assert right.low == pytest.approx(0.025 ** (1 / 20))  # Clopper and Pearson's
    same = crossed_difference(np.full((2, 4), 0.5), np.full((3, 4), 0.5))
    assert (same.mean, same.p) == (0.0, 1.0) and math.isnan(same.low)
    assert math.isnan(crossed_difference(np.full((2, 4), 0.75), np.full((3, 4), 0.5)).p)
