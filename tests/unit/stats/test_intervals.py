"""Intervals against closed forms (t has one for 2 degrees of freedom) and against simulated coverage.

Simulated rates are compared with their nominal value at 3.3 binomial standard errors: a correct interval
fails one of these tests once in a thousand seeds, and the seeds are fixed.
"""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tailrl.stats.intervals import (
    Ratio,
    cluster_interval,
    geometric_interval,
    known_mean,
    log_slope,
    mean_interval,
    problem_interval,
    ratio_difference,
    ratio_interval,
    share_difference,
    share_interval,
)
from tailrl.stats.survival import collapse_step, log_rank, survival
from tailrl.stats.tests import Difference, arm_difference, difference_from, holm, one_sided, paired_difference

T_2 = 0.95 * math.sqrt(2 / (1 - 0.95**2))
"""The 97.5 % point of t with 2 degrees of freedom: F(t) = 1/2 + t / (2 sqrt(2 + t²))."""


def p_two_sided_2(t: float) -> float:
    """Two-sided p of t with 2 degrees of freedom."""
    return 1 - abs(t) / math.sqrt(2 + t * t)


def near_nominal(rate: float, trials: int, nominal: float = 0.95) -> bool:
    return abs(rate - nominal) < 3.3 * math.sqrt(nominal * (1 - nominal) / trials)


def test_mean_interval_closed_form() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    half = T_2 / math.sqrt(3)
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - half)
    assert found.high == pytest.approx(2 + half)


def test_mean_interval_covers() -> None:
    rng, trials = np.random.default_rng(0), 1500
    found = [mean_interval(rng.normal(1.5, 2.0, 4)) for _ in range(trials)]
    assert near_nominal(float(np.mean([f.low <= 1.5 <= f.high for f in found])), trials)


def test_mean_interval_edges() -> None:
    one = mean_interval([0.25])
    assert (one.mean, one.n) == (0.25, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    none = mean_interval([math.nan, math.nan])
    assert none.n == 0
    assert math.isnan(none.mean)
    assert mean_interval([1.0, math.nan, 3.0]) == mean_interval([1.0, 3.0])
    same = mean_interval([0.5, 0.5, 0.5])
    assert (same.low, same.high) == (0.5, 0.5)


def test_problem_interval_covers_where_pooled_samples_do_not() -> None:
    rng, trials, problems, k = np.random.default_rng(1), 1500, 40, 8
    truth, covered, pooled = 0.5, 0, 0
    for _ in range(trials):
        chance = rng.beta(0.8, 0.8, problems)
        correct = rng.uniform(size=(problems, k)) < chance[:, None]
        found = problem_interval(correct)
        covered += found.low <= truth <= found.high
        pooled += abs(correct.mean() - truth) < 1.96 * correct.std() / math.sqrt(correct.size)
    assert near_nominal(covered / trials, trials)
    assert pooled / trials < 0.8


def test_problem_interval_with_nothing_or_all_solved() -> None:
    problems = 20
    none = problem_interval(np.zeros((problems, 4)))
    every = problem_interval(np.ones((problems, 4)))
    bound = 0.025 ** (1 / problems)  # Clopper and Pearson's, in closed form at the ends
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - bound)
    assert (every.mean, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(bound)
    assert math.isnan(problem_interval([[1, 1]]).low)


def test_cluster_interval_of_equal_clusters_is_that_of_their_means() -> None:
    values = np.random.default_rng(2).normal(size=(7, 5))
    found = cluster_interval(values.ravel(), np.repeat(np.arange(7), 5))
    wanted = mean_interval(values.mean(axis=1))
    assert found.n == 7
    np.testing.assert_allclose([found.mean, found.low, found.high], [wanted.mean, wanted.low, wanted.high])


def test_cluster_interval_covers_with_unequal_clusters() -> None:
    rng, trials, covered = np.random.default_rng(3), 1000, 0
    for _ in range(trials):
        cluster = np.repeat(np.arange(40), rng.integers(5, 15, 40))
        found = cluster_interval(rng.normal(size=40)[cluster] + rng.normal(size=cluster.size), cluster)
        covered += found.low <= 0 <= found.high
    # The ratio's interval is right to first order only: a point of slack beside the simulation's error.
    assert 0.925 < covered / trials < 0.965


def test_ratio_interval_covers() -> None:
    """Σ above / Σ below with clustered terms, against the true ratio."""
    rng, trials, covered = np.random.default_rng(5), 1000, 0
    for _ in range(trials):
        cluster = np.repeat(np.arange(40), rng.integers(5, 15, 40))
        below = rng.exponential(size=40)[cluster] * rng.random(cluster.size)
        above = below * (2 + 0.5 * rng.normal(size=40)[cluster] + rng.normal(size=cluster.size))
        found = ratio_interval(above, below, cluster)
        covered += found.low <= 2 <= found.high
    # As above; clusters of very different weight leave the interval a little narrow.
    assert 0.92 < covered / trials < 0.965


def test_ratio_interval_edges() -> None:
    exact = ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], [0, 1, 2])
    assert (exact.mean, exact.low, exact.high, exact.n) == (2, 2, 2, 3)
    none = ratio_interval([0.0, 0.0], [0.0, 0.0], [0, 1])
    assert math.isnan(none.mean) and none.n == 0


def test_share_interval_is_wilsons() -> None:
    found, z = share_interval(3, 50), NormalDist().inv_cdf(0.975)
    centre = (0.06 + z**2 / 100) / (1 + z**2 / 50)
    half = z * math.sqrt(0.06 * 0.94 / 50 + z**2 / 10_000) / (1 + z**2 / 50)
    assert (found.mean, found.n) == (0.06, 50)
    np.testing.assert_allclose([found.low, found.high], [centre - half, centre + half])
    assert share_interval(0, 50).low == 0 < share_interval(0, 50).high


def test_cluster_interval_edges() -> None:
    assert math.isnan(cluster_interval([1.0, 2.0], [4, 4]).low)
    assert cluster_interval([], []).n == 0


def test_paired_difference_closed_form() -> None:
    found = paired_difference([1.0, 2.5, 3.0], [0.0, 0.5, 0.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.p == pytest.approx(p_two_sided_2(2 * math.sqrt(3)))
    assert found.low == pytest.approx(2 - T_2 / math.sqrt(3))
    assert found.high == pytest.approx(2 + T_2 / math.sqrt(3))


def test_paired_difference_covers_and_is_narrower_than_unpaired() -> None:
    rng, trials, covered, narrower = np.random.default_rng(4), 600, 0, 0
    for _ in range(trials):
        difficulty = rng.uniform(size=30)
        first, second = difficulty + rng.normal(0.1, 0.1, 30), difficulty + rng.normal(0, 0.1, 30)
        paired, unpaired = paired_difference(first, second), arm_difference(first, second)
        covered += paired.low <= 0.1 <= paired.high
        narrower += paired.high - paired.low < unpaired.high - unpaired.low
    assert near_nominal(covered / trials, trials)
    assert narrower == trials


def test_paired_difference_edges() -> None:
    same = paired_difference([0.0, 1.0], [0.0, 1.0])
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    shifted = paired_difference([0.1, 1.1], [0.0, 1.0])
    assert shifted.mean == pytest.approx(0.1) and math.isnan(shifted.p) and math.isnan(shifted.low)
    assert math.isnan(paired_difference([1.0], [0.0]).p)


def test_arm_difference_closed_form() -> None:
    found = arm_difference([0.0, 2.0], [1.0, 3.0])
    assert (found.mean, found.n) == (-1.0, 2)
    assert found.p == pytest.approx(p_two_sided_2(1 / math.sqrt(2)))
    assert found.low == pytest.approx(-1 - T_2 * math.sqrt(2))
    assert found.high == pytest.approx(-1 + T_2 * math.sqrt(2))


def test_arm_difference_covers_with_unequal_variances() -> None:
    rng, trials = np.random.default_rng(5), 800
    found = [arm_difference(rng.normal(1, 1, 5), rng.normal(0, 4, 8)) for _ in range(trials)]
    covered = np.mean([f.low <= 1 <= f.high for f in found])
    assert near_nominal(float(covered), trials)


def test_arm_difference_edges() -> None:
    single = arm_difference([0.5], [0.25, 0.75])
    assert (single.mean, single.n) == (0.0, 1)
    assert math.isnan(single.low)
    assert math.isnan(single.p)
    assert arm_difference([1.0, 1.0], [1.0, 1.0]).p == 1.0
    # Two seeds with the same count of right answers happen; how much others would differ is not known from them.
    agreeing = arm_difference([0.55, 0.55], [0.5, 0.5])
    assert agreeing.mean == pytest.approx(0.05) and agreeing.n == 2
    assert math.isnan(agreeing.p) and math.isnan(agreeing.low) and math.isnan(agreeing.high)


def test_arm_difference_where_the_seeds_of_one_arm_agree() -> None:
    found = arm_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])  # then Welch is the t test of the other arm alone
    assert found.p == pytest.approx(p_two_sided_2(2 * math.sqrt(3)))
    assert found.high == pytest.approx(2 + T_2 / math.sqrt(3))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_the_closed_test_of_bonferroni(p_M: list[float]) -> None:
    """A hypothesis is rejected if Bonferroni rejects every set of hypotheses that contains it."""
    sets = [s for size in range(1, len(p_M) + 1) for s in itertools.combinations(range(len(p_M)), size)]
    expected = [max(min(1.0, len(s) * min(p_M[j] for j in s)) for s in sets if i in s) for i in range(len(p_M))]
    assert holm(p_M) == pytest.approx(expected)


def test_holm_leaves_out_nan() -> None:
    assert holm([0.02, math.nan, 0.03]) == pytest.approx([0.04, math.nan, 0.04], nan_ok=True)


RISE = [0.5] * 5
"""The first rewards of a run that rises."""


@pytest.mark.parametrize(
    ("reward", "step"),
    [
        ([0.4] * 30, None),
        ([0.0] * 30, None),
        ([*RISE, *[0.8] * 15, *[0.0] * 20], 22),  # trailing mean of 5: 0.32 after three zeros
        ([*RISE, *[0.8] * 15, *[0.0] * 10, *[0.5] * 10], None),  # a dip that ends
        ([*RISE, *[0.8] * 15, *[0.0] * 10, *[0.6] * 10, *[0.0] * 6], 41),  # the second one does not
        ([*RISE, *[0.8] * 15, *[0.0] * 10, *[0.6] * 10, *[0.0] * 5], None),  # nor has it lasted five steps
        ([*RISE, *[0.8] * 15, *[0.0] * 6], None),
        ([*RISE, *[0.8] * 15, *[0.0] * 7], 22),
        ([0.2] * 10 + [0.8] * 10 + [0.3] * 20, 23),
        ([0.8] * 3, None),
        ([0.8] * 20 + [0.0] * 20, None),  # it had not risen
        ([1.0] * 20 + [0.0] * 20, None),
        ([0.5 * 0.9**n for n in range(60)], None),
        ([*RISE, *[0.59] * 15, *[0.0] * 20], None),  # odds of 1.44 against 1
        ([*RISE, *[0.61] * 15, *[0.0] * 20], 22),  # 1.56
        ([0.0] * 5 + [0.1] * 15 + [0.0] * 20, 22),
    ],
)
def test_collapse_is_a_loss_of_half_after_a_rise_that_lasts(reward: list[float], step: int | None) -> None:
    assert collapse_step(reward, 5) == step


def test_survival_is_kaplan_and_meiers_product() -> None:
    curve = survival([10, 20, None, 20, None, 40], [50, 50, 15, 50, 50, 50])
    assert curve.step_E.tolist() == [10, 20, 40]
    assert curve.share_E == pytest.approx([5 / 6, 5 / 6 * 2 / 4, 5 / 6 * 2 / 4 * 1 / 2])
    assert (curve.runs, curve.collapsed) == (6, 4)
    # Greenwood's variance on the scale log(−log S), at the second event.
    share, spread = 5 / 12, math.sqrt(1 / (6 * 5) + 2 / (4 * 2)) / abs(math.log(5 / 12))
    assert curve.low_E[1] == pytest.approx(share ** math.exp(1.959964 * spread), rel=1e-5)
    assert curve.high_E[1] == pytest.approx(share ** math.exp(-1.959964 * spread), rel=1e-5)


def test_survival_without_a_collapse_is_empty() -> None:
    curve = survival([None, None], [50, 50])
    assert (curve.step_E.size, curve.collapsed) == (0, 0)
    assert math.isnan(log_rank(([None], [50]), ([None], [50])))


def excess(first: list[int | None], second: list[int | None]) -> float:
    """Observed minus expected collapses of the first arm: per step, the collapses times its share of runs at risk."""
    total = 0.0
    for step in {s for s in (*first, *second) if s is not None}:
        at_risk = [sum((30 if s is None else s) >= step for s in steps) for steps in (first, second)]
        died = (*first, *second).count(step)
        total += first.count(step) - died * at_risk[0] / sum(at_risk)
    return total


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([5, 9, None], [12, 20, None, None]),
        ([5, 9, 9], [9, None, None]),  # ties
        ([None, None], [3, 4, 5]),
        ([1, 2, None], [7, None, 6, 7]),
        ([1], [None]),
    ],
)
def test_log_rank_is_the_share_of_splits_with_as_many_collapses_too_many(
    first: list[int | None], second: list[int | None]
) -> None:
    runs = [*first, *second]
    chosen = itertools.combinations(range(len(runs)), len(first))
    sums = [excess([runs[i] for i in own], [s for i, s in enumerate(runs) if i not in own]) for own in chosen]
    for one, other, sign in ((first, second, 1), (second, first, -1)):
        expected = np.mean([sign * total >= sign * excess(first, second) - 1e-9 for total in sums])
        assert log_rank((one, [30] * len(one)), (other, [30] * len(other))) == pytest.approx(expected)


def test_log_rank_of_many_runs_is_near_the_normal_approximation() -> None:
    rng = np.random.default_rng(3)
    drawn = rng.integers(1, 40, 40), rng.integers(5, 50, 40)
    first, second = ([int(step) if step < 30 else None for step in steps] for steps in drawn)
    variance = 0.0
    for step in {s for s in (*first, *second) if s is not None}:
        at_risk = [sum((30 if s is None else s) >= step for s in steps) for steps in (first, second)]
        n, died = sum(at_risk), (*first, *second).count(step)
        variance += died * at_risk[0] * at_risk[1] * (n - died) / n**2 / max(1, n - 1)
    expected = math.erfc(excess(first, second) / math.sqrt(2 * variance)) / 2
    assert log_rank((first, [30] * 40), (second, [30] * 40)) == pytest.approx(expected, abs=0.015)


def test_log_rank_of_few_runs_holds_its_level() -> None:
    """scipy's chi-square test does not: three runs per arm, where all of one arm collapse and none of the other."""
    assert log_rank(([5, 6, 7], [30] * 3), ([None] * 3, [30] * 3)) == pytest.approx(1 / 20)
    rng, trials, level = np.random.default_rng(1), 600, 0.05
    p = [
        log_rank(*(([int(s) if s < 30 else None for s in rng.integers(1, 60, 5)], [30] * 5) for _ in range(2)))
        for _ in range(trials)
    ]
    assert np.nanmean(np.array(p) <= level) <= level + 3.3 * math.sqrt(level * (1 - level) / trials)


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [((56, 70), (48, 80), (0.0524, 0.3339)), ((10, 10), (0, 20), (0.6791, 1.0)), ((0, 5), (0, 5), (-0.4345, 0.4345))],
)
def test_share_difference_is_newcombes(
    first: tuple[int, int], second: tuple[int, int], ends: tuple[float, float]
) -> None:
    """His tenth method, Statistics in Medicine 17 (1998) 873, Table II; the last by its formula."""
    found = share_difference(first, second)
    assert found.mean == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert (found.low, found.high) == pytest.approx(ends, abs=5e-5)
    assert found.n == min(first[1], second[1])


def test_difference_from_a_number() -> None:
    found = difference_from([1.0, 2.0, math.nan, 3.0], 0.5)
    assert (found.mean, found.n) == (1.5, 3)
    assert found.low == pytest.approx(1.5 - T_2 / math.sqrt(3))
    assert found.p == pytest.approx(p_two_sided_2(1.5 * math.sqrt(3)))
    assert difference_from([2.0, 2.0], 2.0).p == 1.0
    assert math.isnan(difference_from([2.0], 1.0).p)
    assert difference_from([math.nan], 1.0).n == 0


def test_equal_values_have_an_interval_only_where_they_are_exact_by_nature() -> None:
    """Two seeds of 0.5 may agree by chance, so that their variance is unknown. Two zeros are no chance."""
    found = difference_from([0.5, 0.5], 0.25)
    assert (found.mean, found.n) == (0.25, 2)
    assert math.isnan(found.p) and math.isnan(found.low) and math.isnan(found.high)
    assert difference_from([0.0, 0.0], -1.0) == Difference(1.0, 1.0, 1.0, 0.0, 2)
    assert difference_from([-14.0, -14.0], -3.0, exact=(0.0, -14.0)).p == 0.0
    assert math.isnan(difference_from([-14.0, -14.0], -3.0).p)


def test_one_sided_halves_p_on_the_observed_side() -> None:
    assert one_sided(Difference(1.0, 0.5, 1.5, 0.02, 3)) == pytest.approx((0.01, 0.99))
    assert one_sided(Difference(-1.0, -1.5, -0.5, 0.02, 3)) == pytest.approx((0.99, 0.01))
    assert one_sided(Difference(0.0, -1.0, 1.0, 1.0, 3)) == (0.5, 0.5)
    assert all(math.isnan(p) for p in one_sided(Difference(1.0, math.nan, math.nan, math.nan, 1)))


def test_a_difference_of_ratios_of_pairs_is_the_paired_t_interval() -> None:
    """With one term of equal weight a cluster on both sides, it is Student's interval of the paired differences."""
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, 30)) + random.normal(size=30)
    ones, pairs = np.ones(30), np.arange(30.0)
    found = ratio_difference(Ratio(first, ones, pairs), Ratio(second, ones, pairs))
    expected = mean_interval(second - first)
    assert (found.mean, found.low, found.high, found.n) == pytest.approx(
        (expected.mean, expected.low, expected.high, 30)
    )


def test_a_difference_of_ratios_covers() -> None:
    """Of two clustered samples of unequal weights, partly of shared clusters: in 95 % of the samples."""
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(600):
        shared = random.normal(size=60)
        sides = []
        for shift, clusters in ((0.0, np.arange(40)), (0.5, np.arange(20, 60))):
            weight = random.integers(1, 9, 40).astype(float)
            value = weight * (shift + shared[clusters] + random.normal(size=40))
            known = np.where(clusters < 50, clusters, np.nan)
            sides.append(Ratio(value, weight, known.astype(float)))
        found = ratio_difference(sides[0], sides[1])
        hits += found.low <= 0.5 <= found.high
    assert abs(hits / 600 - 0.95) < 3.3 * math.sqrt(0.95 * 0.05 / 600)


def test_a_difference_without_terms_is_none() -> None:
    nothing = np.empty(0)
    assert math.isnan(ratio_difference(Ratio(nothing, nothing, nothing), Ratio(nothing, nothing, nothing)).mean)
    # One prompt, which both share: a difference, and no interval.
    one = ratio_difference(Ratio(np.ones(2), np.ones(2), np.zeros(2)), Ratio(2 * np.ones(3), np.ones(3), np.zeros(3)))
    assert one.mean == 1 and one.n == 1 and math.isnan(one.low) and math.isnan(one.high)


def test_a_geometric_mean_leaves_out_what_is_not_above_0() -> None:
    values = [0.5, 2.0, 8.0, 3.0]
    found = geometric_interval([*values, 0.0, math.nan])
    assert found.mean == pytest.approx(stats.gmean(values)) and found.n == 4
    logs = stats.t.interval(0.95, 3, np.log(values).mean(), stats.sem(np.log(values)))
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(logs)))


def test_the_slope_of_a_power_is_its_exponent() -> None:
    x = np.array([0.1, 1.0, 7.0, 30.0])
    assert log_slope(x, 3.0 * x**1.7) == pytest.approx(1.7)
    assert math.isnan(log_slope(x, [1.0, 2.0, 0.0, 4.0])) and math.isnan(log_slope(x, [1.0, 2.0, math.nan, 4.0]))


def test_a_mean_of_what_is_known() -> None:
    assert known_mean([1.0, math.nan, 4.0]) == 2.5
    assert math.isnan(known_mean([math.nan])) and math.isnan(known_mean([]))
