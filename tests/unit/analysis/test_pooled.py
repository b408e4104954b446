"""The remedies pooled over warm starts, against the paired and Welch tests of scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from tailrl.analysis.pooled import Pooled, pooled, pooled_scores
from tailrl.stats.tests import holm

ARMS = ("exact", "floor_naive", "floor_tis", "floor_dvp", "floor_control", "stale_naive", "stale_tis")


def parts_of(count: int, seeds: int = 4) -> list[dict[str, list[float]]]:
    """Parts whose warm starts differ far more than the arms do, so that pairing matters."""
    rng = np.random.default_rng(3)
    lifts = dict(zip(ARMS, (0.2, 0.0, 0.05, 0.1, 0.15, 0.0, 0.02), strict=True))
    return [
        {
            "base": [start],
            **{arm: list(start + lift + 0.02 * rng.standard_normal(seeds)) for arm, lift in lifts.items()},
        }
        for start in rng.uniform(0.2, 0.6, count)
    ]


def found(parts: list[dict[str, list[float]]]) -> dict[tuple[str, str, str], Pooled]:
    return {(one.cause, one.remedy, one.less): one for one in pooled(parts)}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_difference_is_the_paired_test_of_the_parts_means(count: int) -> None:
    parts = parts_of(count)
    for (cause, remedy, less), one in found(parts).items():
        reference = "exact" if less == "exact" else f"{cause}_{less}"
        if any(reference not in part for part in parts):
            assert math.isnan(one.difference.mean) and one.difference.n == 0
            continue
        means = np.array([[np.mean(part[arm]) for arm in (f"{cause}_{remedy}", reference)] for part in parts])
        test = stats.ttest_rel(*means.T)
        assert one.difference.mean == pytest.approx(np.mean(means[:, 0] - means[:, 1]))
        assert (one.difference.low, one.difference.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
        assert one.difference.p == pytest.approx(test.pvalue)
        assert one.difference.n == count
        within = means[:, 0] - means[:, 1]
        assert (one.least, one.most) == pytest.approx((within.min(), within.max()))


def test_holm_is_over_the_remedies_of_a_cause_and_one_reference() -> None:
    read = found(parts_of(5))
    assert list(read)[:2] == [("floor", "tis", "naive"), ("floor", "dvp", "naive")]
    for less in ("naive", "control", "exact"):
        own = [read["floor", remedy, less] for remedy in ("tis", "dvp")]
        assert [one.p_holm for one in own] == holm([one.difference.p for one in own]).tolist()
    alone = read["stale", "tis", "naive"]
    assert alone.p_holm == alone.difference.p


def test_one_warm_start_is_described_over_its_seeds_and_not_tested() -> None:
    (part,) = parts = parts_of(1)
    one = found(parts)["floor", "dvp", "naive"]
    welch = stats.ttest_ind(part["floor_dvp"], part["floor_naive"], equal_var=False).confidence_interval(0.95)
    assert (one.difference.low, one.difference.high) == pytest.approx(tuple(welch))
    assert math.isnan(one.difference.p) and math.isnan(one.p_holm)
    assert one.least == one.most == pytest.approx(one.difference.mean)


def test_a_part_that_lacks_an_arm_is_left_out_of_its_pairs_alone() -> None:
    parts = parts_of(4)
    del parts[1]["floor_dvp"]
    read = found(parts)
    assert (read["floor", "dvp", "naive"].difference.n, read["floor", "tis", "naive"].difference.n) == (3, 4)


def test_a_remedy_that_samples_as_exact_does_differs_from_it_by_nothing() -> None:
    parts = [{**part, "floor_verified": part["exact"]} for part in parts_of(3)]
    one = found(parts)["floor", "verified", "exact"].difference
    assert (one.mean, one.low, one.high, one.p) == (0.0, 0.0, 0.0, 1.0)


def test_scores_are_over_warm_starts_or_over_the_seeds_of_one() -> None:
    parts = parts_of(5)
    for one in pooled_scores(parts):
        means = [np.mean(part[one.arm]) for part in parts]
        ends = stats.t.interval(0.95, 4, np.mean(means), stats.sem(means))
        assert (one.score.low, one.score.high) == pytest.approx(ends)
        assert (one.warm_starts, one.seeds) == (5, 5 if one.arm == "base" else 20)
    base, exact, *_ = pooled_scores(parts[:1])
    assert (base.arm, exact.arm) == ("base", "exact")
    assert base.score.mean == parts[0]["base"][0] and math.isnan(base.score.low)
    ends = stats.t.interval(0.95, 3, np.mean(parts[0]["exact"]), stats.sem(parts[0]["exact"]))
    assert (exact.score.low, exact.score.high) == pytest.approx(ends)
