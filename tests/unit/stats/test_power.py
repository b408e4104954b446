"""Seeds needed and least effects: against Cohen's table, and against simulated power."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tailrl.stats.power import MOST, POWER, least_effect, paired_power, seeds_needed, welch_power


@pytest.mark.parametrize(("d", "n"), [(0.2, 394), (0.5, 64), (0.8, 26), (1.0, 17)])
def test_seeds_needed_are_cohens(d: float, n: int) -> None:
    """Statistical Power Analysis (1988), table 2.4.1: two-sided 5 %, power 0.80, in units of the standard deviation."""
    assert seeds_needed([-1.0, 0.0, 1.0], [d - 1, d, d + 1]) == n


def simulated(effect: float, spread: tuple[float, float], sizes: tuple[int, int], trials: int) -> float:
    rng = np.random.default_rng(0)
    first, second = (own * rng.normal(size=(size, trials)) for own, size in zip(spread, sizes, strict=True))
    return float(np.mean(stats.ttest_ind(first + effect, second, equal_var=False).pvalue <= 0.05))


def near(rate: float, trials: int) -> float:
    """3.3 standard errors: a correct number fails once in a thousand seeds, and the seed is fixed."""
    return 3.3 * math.sqrt(rate * (1 - rate) / trials)


def test_seeds_needed_have_the_power_and_one_fewer_has_not() -> None:
    """Unequal variances: observed standard deviations of exactly 1 and 3."""
    first, second = [1.0, -1.0, 0.0], [3 + 3.0, 3 - 3.0, 3 + 0.0]
    n, trials = int(seeds_needed(first, second)), 20_000
    assert 8 <= n <= 14
    assert simulated(3.0, (1.0, 3.0), (n, n), trials) > POWER - near(POWER, trials)
    assert simulated(3.0, (1.0, 3.0), (n - 1, n - 1), trials) < POWER + near(POWER, trials)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (4, 6), (10, 5)])
def test_the_least_effect_is_detected_with_that_power(sizes: tuple[int, int]) -> None:
    rng, trials = np.random.default_rng(1), 20_000
    first, second = rng.normal(size=sizes[0]), 2 * rng.normal(size=sizes[1])
    spread = float(first.std(ddof=1)), float(second.std(ddof=1))
    rate = simulated(least_effect(first, second), spread, sizes, trials)
    assert abs(rate - POWER) < near(POWER, trials) + 0.003  # beside the simulation's error that of the quadrature


@pytest.mark.parametrize(("squares", "sizes"), [((1.0, 1.0), (3, 3)), ((1.0, 9.0), (4, 8)), ((1.0, 0.0), (5, 2))])
def test_the_power_is_the_simulated_one(squares: tuple[float, float], sizes: tuple[int, int]) -> None:
    trials, spread = 20_000, (math.sqrt(squares[0]), math.sqrt(squares[1]))
    powers = []
    for effect in (0.0, 1.0, 3.0):
        powers.append(welch_power(effect, squares, sizes))
        assert abs(powers[-1] - simulated(effect, spread, sizes, trials)) < near(powers[-1], trials) + 0.003
    assert powers == sorted(powers)


@pytest.mark.parametrize(("effect", "spread", "pairs"), [(0.0, 1.0, 3), (1.0, 1.0, 3), (2.0, 1.5, 5), (-3.0, 2.0, 4)])
def test_the_power_of_pairs_is_the_simulated_one_and_that_of_the_noncentral_t(
    effect: float, spread: float, pairs: int
) -> None:
    found, trials = paired_power(effect, spread, pairs), 20_000
    drawn = effect + spread * np.random.default_rng(0).normal(size=(pairs, trials))
    assert abs(found - np.mean(stats.ttest_1samp(drawn, 0.0).pvalue <= 0.05)) < near(found, trials)
    reach, shift = stats.t.ppf(0.975, pairs - 1), effect / spread * math.sqrt(pairs)
    exact = stats.nct.sf(reach, pairs - 1, shift) + stats.nct.cdf(-reach, pairs - 1, shift)
    assert found == pytest.approx(exact, abs=1e-3)


HEADERS = {
    "smollm2_fp8": [(5, 1.0, 3, 1, 0.98), (5, 1.5, 3, 1, 0.81), (5, 2.0, 3, 1, 0.62), (5, 3.0, 3, 1, 0.37)],
    "causes": [
        *((5, spread, 5, 5, said) for spread, said in ((1.5, 0.95), (2.0, 0.76), (2.5, 0.55), (3.0, 0.39))),
        *((5, spread, 5, 1, said) for spread, said in ((1.5, 1.0), (2.0, 0.98), (2.5, 0.91), (3.0, 0.79))),
    ],
    "horizon": [
        *((5, spread, 5, 1, said) for spread, said in ((2.0, 0.98), (3.0, 0.79), (4.0, 0.56), (5.0, 0.40))),
        *((10, spread, pairs, 1, said) for spread, pairs, said in ((4.0, 5, 0.98), (5.0, 5, 0.91))),
        *((10, spread, pairs, 1, said) for spread, pairs, said in ((4.0, 3, 0.62), (5.0, 3, 0.47))),
    ],
}
"""Effect, SD and number of parts, tests that share Holm's correction, and the power that the study's header says."""


@pytest.mark.parametrize("study", HEADERS)
def test_headers_say_the_power_of_their_paired_tests(study: str) -> None:
    text = (Path(__file__).parents[3] / f"studies/{study}.yaml").read_text(encoding="utf-8")
    for effect, spread, pairs, tests, said in HEADERS[study]:
        assert round(paired_power(effect, spread, pairs, tests), 2) == said
        assert f"{said:.2f}" in text


def test_edges() -> None:
    assert math.isnan(seeds_needed([0.5], [0.25, 0.75]))
    assert math.isnan(least_effect([0.5], [0.25, 0.75]))
    assert seeds_needed([0.5, 0.6], [0.6, 0.5]) == math.inf  # no difference at all
    assert seeds_needed([0.0, 1.0, 2.0], [0.01, 1.01, 2.01]) == math.inf
    assert MOST < 10_000
    assert seeds_needed([0.5, 0.5], [0.75, 0.75]) == 2
    assert math.isnan(least_effect([0.5, 0.5], [0.75, 0.75]))
    assert math.isnan(seeds_needed([0.5, 0.5], [0.5, 0.5]))
