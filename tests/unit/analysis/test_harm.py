"""Harm by the cause of a mismatch, over parts."""

import math

import numpy as np
import pytest
from scipy import stats

from tailrl.analysis.harm import Harm, harms

Numbers = dict[str, list[float]]
Part = tuple[Numbers, Numbers]
"""Scores and k3 by arm."""

ARMS = ("int4", "both", "noise_int4", "noise_both", "stale_both")
LOST = {
    "int4": (2, 3, 4),
    "both": (5, 9, 6),
    "noise_int4": (1, 4, 2),
    "noise_both": (8, 9, 13),
    "stale_both": (0, 1, 2),
}
"""Points by which an arm falls below its control, in each of three parts."""
K3 = {"int4": 3e-3, "both": 8e-3, "noise_int4": 5e-3, "noise_both": 1.7e-2, "stale_both": 9e-3}


def parts_of(count: int = 3) -> list[Part]:
    """Two seeds a part; parts and seeds have levels of their own, which pairing takes out."""
    made = []
    for part in range(count):
        scores = {"exact": [0.9, 0.9]}
        for arm in ARMS:
            level = 0.7 + 0.05 * part
            scores[f"{arm}_control"] = [level, level + 0.1]
            scores[arm] = [level + 0.1 - LOST[arm][part] / 100, level - LOST[arm][part] / 100]
        k3 = {arm: [0.5 * K3[arm] * 2**part, 1.5 * K3[arm] * 2**part] for arm in ARMS} | {"exact": [0.0, 0.0]}
        made.append((scores, k3 | {f"{arm}_control": [0.0, 0.0] for arm in ARMS}))
    return made


def by_arm(parts: list[Part]) -> dict[str, Harm]:
    return {one.arm: one for one in harms([scores for scores, _ in parts], [k3 for _, k3 in parts])}


def test_an_arm_is_placed_by_its_name() -> None:
    found = {arm: (one.cause, one.engine, one.family) for arm, one in by_arm(parts_of()).items()}
    assert found == {
        "int4": ("engine", "int4", "other"),
        "both": ("engine", "both", "primary"),
        "noise_int4": ("noise", "int4", "other"),
        "noise_both": ("noise", "both", "primary"),
        "stale_both": ("stale", "both", "primary"),
    }


def test_harm_is_paired_within_parts() -> None:
    found = by_arm(parts_of())
    for arm, lost in LOST.items():
        expected = stats.ttest_1samp(-np.array(lost) / 100, 0.0)
        interval = expected.confidence_interval(0.95)
        own = found[arm].harm
        assert [own.mean, own.low, own.high, own.p] == pytest.approx([-np.mean(lost) / 100, *interval, expected.pvalue])
    smallest = min(found[arm].harm.p for arm in ("both", "noise_both", "stale_both"))
    assert min(found[arm].harm_p_holm for arm in ("both", "noise_both", "stale_both")) == pytest.approx(3 * smallest)


def test_a_cause_is_compared_with_its_engine_where_their_k3_are_alike() -> None:
    found = by_arm(parts_of())
    assert {arm: one.alike for arm, one in found.items()} == {arm: arm != "noise_both" for arm in ARMS}
    expected = stats.ttest_rel([-1, -4, -2], [-2, -3, -4])
    beyond = found["noise_int4"].beyond
    assert (beyond.mean, beyond.p) == (pytest.approx((-7 + 9) / 300), pytest.approx(expected.pvalue))
    assert math.isnan(found["int4"].beyond.mean)
    dialled = ("noise_int4", "noise_both", "stale_both")
    assert min(found[arm].beyond_p_holm for arm in dialled) == pytest.approx(
        3 * min(found[arm].beyond.p for arm in dialled)
    )


def test_k3_is_a_geometric_mean_over_parts_of_the_means_over_seeds() -> None:
    for arm, one in by_arm(parts_of()).items():
        logs = np.log(K3[arm] * 2 ** np.arange(3))
        half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
        assert (one.k3.mean, one.k3.n) == (pytest.approx(2 * K3[arm]), 3)
        assert [one.k3.low, one.k3.high] == pytest.approx(np.exp([logs.mean() - half, logs.mean() + half]))


def test_one_part_has_no_interval_and_a_missing_arm_leaves_its_part_out() -> None:
    (part,) = parts_of(1)
    assert math.isnan(by_arm([part])["both"].harm.low) and by_arm([part])["both"].harm.n == 1
    first, *others = parts_of()
    short = ({arm: own for arm, own in first[0].items() if arm != "both"}, first[1])
    found = by_arm([*others, short])
    assert (found["both"].harm.n, found["noise_both"].harm.n, found["noise_both"].beyond.n) == (2, 3, 2)


def test_an_engine_without_a_mismatch_is_like_no_cause() -> None:
    parts = [(scores, k3 | {"int4": [0.0, 0.0]}) for scores, k3 in parts_of()]
    found = by_arm(parts)
    assert math.isnan(found["int4"].k3.mean) and not found["noise_int4"].alike
