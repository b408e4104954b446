"""Weighted sums of arms' means, such as a difference of two differences."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from scipy import stats

from tailrl.stats.intervals import cluster_interval, mean_interval
from tailrl.stats.tests import above_and_below, arm_contrast, arm_difference


def test_arm_contrast_of_two_arms_is_their_difference() -> None:
    """scipy has Welch's test for two."""
    rng = np.random.default_rng(5)
    for first, second in ((rng.normal(1, 1, 5), rng.normal(0, 4, 8)), ([0.25, 0.5, 0.75], [0.5, 0.5, 0.5])):
        found, expected = arm_contrast([first, second], [1, -1]), arm_difference(first, second)
        assert astuple(found) == pytest.approx(astuple(expected), rel=1e-12)


@pytest.mark.slow  # the contrast equals its formula
def test_arm_contrast_covers_with_four_arms() -> None:
    """A difference of differences of unlike arms; the interval misses in 5 % of trials, and so does p."""
    rng, trials = np.random.default_rng(11), 4000
    arms = ((0.4, 0.05, 10), (0.1, 0.3, 5), (0.2, 0.01, 7), (0.3, 0.1, 6))  # mean, deviation, seeds
    found = [arm_contrast([rng.normal(*arm) for arm in arms], (1, -1, -1, 1)) for _ in range(trials)]
    missed = np.mean([not f.low <= 0.4 <= f.high for f in found])
    # Satterthwaite's degrees of freedom are an approximation: one point beside three standard errors of the trials.
    assert abs(missed - 0.05) < 0.01 + 3 * math.sqrt(0.05 * 0.95 / trials)
    none = [arm_contrast([rng.normal(0, s, n) for _, s, n in arms], (1, -1, -1, 1)).p for _ in range(trials)]
    assert abs(np.mean(np.array(none) <= 0.05) - 0.05) < 0.01 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_arm_contrast_edges() -> None:
    assert math.isnan(arm_contrast([[0.5], [0.25, 0.75], [0.0, 1.0], [0.0, 1.0]], (1, -1, -1, 1)).p)
    same = arm_contrast([[1.0, 1.0], [0.5, 0.5], [0.75, 0.75], [0.5, 0.5]], (1, -1, -1, 1))
    assert (same.mean, same.n) == (0.25, 2) and math.isnan(same.p) and math.isnan(same.low)


def test_a_mean_with_its_interval_has_the_p_of_students_test() -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, 12)
    above, below = (stats.ttest_1samp(values, 0.0, alternative=side).pvalue for side in ("greater", "less"))
    assert above_and_below(mean_interval(values)) == pytest.approx((above, below), rel=1e-9)
    assert np.isnan(above_and_below(cluster_interval([1.0, 2.0], [0, 0]))).all(), "one cluster has no interval"
