"""The mismatch of a run's first steps, and its ratio between arms."""

import math

import numpy as np
import pytest
from claims_fixture import DVP, EXACT, NAIVE, STEPS, made, results_of
from scipy import stats

from tailrl.reports.mismatch.numbers import FIRST_STEPS, FirstK3, first_k3, k3_ratios


def test_the_first_ten_steps_count_and_no_other() -> None:
    early = [0.1] * 5 + [0.3] * 5
    results = results_of(
        a=made(NAIVE, unmasked=[early + [9.0] * (STEPS - FIRST_STEPS), [0.5] * STEPS]),
        gaps=made(DVP, unmasked=[[math.nan, 0.4] * (STEPS // 2)]),
        none=made(EXACT, unmasked=[[math.nan] * STEPS]),
    )
    found = {(one.arm, one.seed): one.k3 for one in first_k3(results)}
    none = found.pop(("none", 0))
    assert found == pytest.approx({("a", 0): 0.2, ("a", 1): 0.5, ("gaps", 0): 0.4})
    assert math.isnan(none)


def test_a_ratio_is_of_geometric_means_over_seeds_that_both_arms_have() -> None:
    above, below = {0: 2e-3, 1: 5e-3, 2: 3e-3, 7: 1.0}, {2: 4e-3, 1: 4e-3, 0: 4e-3, 9: 1e-9}
    numbers = [FirstK3("below", seed, k3) for seed, k3 in below.items()]
    numbers += [FirstK3("above", seed, k3) for seed, k3 in above.items()]
    numbers += [FirstK3("zero", seed, 0.0) for seed in below] + [FirstK3("unknown", 0, math.nan)]
    (found,) = k3_ratios(numbers)
    expected = stats.ttest_rel(np.log([2e-3, 5e-3, 3e-3]), np.log([4e-3] * 3))
    interval = np.exp(expected.confidence_interval(0.95))
    assert (found.first, found.second, found.n) == ("above", "below", 3)
    assert [found.ratio, found.low, found.high, found.p] == pytest.approx(
        [(2e-3 * 5e-3 * 3e-3) ** (1 / 3) / 4e-3, *interval, expected.pvalue]
    )


def test_a_single_seed_has_no_interval() -> None:
    (found,) = k3_ratios([FirstK3("a", 0, 1e-3), FirstK3("b", 0, 2e-3)])
    assert (found.ratio, found.n) == (pytest.approx(2.0), 1)
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)
