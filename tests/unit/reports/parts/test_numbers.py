"""Endpoints over parts, against the paired and Welch tests of scipy, plain loops, and simulated slopes."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from parts_fixture import POOLS
from scipy import stats

from tailrl.config.pooled import Pool
from tailrl.reports.parts.numbers import (
    POOLED_SCORE,
    PartNumbers,
    PooledLine,
    pooled_changes,
    pooled_equivalences,
    pooled_lines,
    pooled_measures,
    pooled_slopes,
)
from tailrl.stats.tests import holm

REMEDIES = ("exact", "floor_naive", "floor_tis", "floor_dvp", "floor_control", "engine_naive", "engine_tis")
CAUSES = ("int4", "both", "noise_int4", "noise_both", "stale_both")
LOST = {
    "int4": (2, 3, 4),
    "both": (5, 9, 6),
    "noise_int4": (1, 4, 2),
    "noise_both": (8, 9, 13),
    "stale_both": (0, 1, 2),
}
"""Points by which an arm falls below its control, in each of three parts."""
K3 = {"int4": 3e-3, "both": 8e-3, "noise_int4": 5e-3, "noise_both": 1.7e-2, "stale_both": 9e-3}
SIZE = "k3 of the first ten steps, nats"
TOKENS, DELTA, DELTA_SD, ESS = POOLS["long"].measures


def by_seed(values: Iterable[float]) -> dict[int, float]:
    return dict(enumerate(values, start=300))


def values(numbers: dict[int, float]) -> list[float]:
    return list(numbers.values())


def remedies(count: int, seeds: int = 4) -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """PartNumbers whose warm starts differ far more than the arms do, so that pairing matters."""
    rng = np.random.default_rng(3)
    lifts = dict(zip(REMEDIES, (0.2, 0.0, 0.05, 0.1, 0.15, 0.0, 0.02), strict=True))
    return {
        str(n): {
            POOLED_SCORE: {
                "base": {0: start},
                **{arm: by_seed(start + lift + 0.02 * rng.standard_normal(seeds)) for arm, lift in lifts.items()},
            }
        }
        for n, start in enumerate(rng.uniform(0.2, 0.6, count), start=1)
    }


def causes(count: int = 3) -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """Two seeds a part; parts and seeds have levels of their own, which pairing takes out."""
    made = {}
    for part in range(count):
        scores = {"exact": by_seed([0.9, 0.9])}
        for arm in CAUSES:
            level, lost = 0.7 + 0.05 * part, LOST[arm][part] / 100
            scores[f"{arm}_control"] = by_seed([level, level + 0.1])
            scores[arm] = by_seed([level + 0.1 - lost, level - lost])
        k3 = {arm: by_seed([0.5 * K3[arm] * 2**part, 1.5 * K3[arm] * 2**part]) for arm in CAUSES}
        k3 |= {f"{arm}_control": by_seed([0.0, 0.0]) for arm in CAUSES} | {"exact": by_seed([0.0, 0.0])}
        made[str(part + 1)] = {POOLED_SCORE: scores, SIZE: k3}
    return made


def lines(name: str, parts: PartNumbers) -> dict[tuple[str, str], PooledLine]:
    return {(one.family, one.arm): one for one in pooled_lines(POOLS[name], parts)}


# --- parts that repeat each other ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_difference_is_the_paired_test_of_the_parts_means(count: int) -> None:
    parts = remedies(count)
    found = lines("remedies_k3", parts)
    assert len(found) == 9 + 3
    for (family, arm), one in found.items():
        reference = one.minus
        of_cause = arm.split("_")[0] in family or family == "what there was to remedy"
        assert of_cause and reference in (*REMEDIES, "engine_control")
        if reference == "engine_control":
            assert math.isnan(one.difference.mean) and one.difference.n == 0
            continue
        means = np.array(
            [[np.mean(values(part[POOLED_SCORE][name])) for name in (arm, reference)] for part in parts.values()]
        )
        test = stats.ttest_rel(*means.T)
        assert one.difference.mean == pytest.approx(np.mean(means[:, 0] - means[:, 1]))
        assert (one.difference.low, one.difference.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
        assert one.difference.p == pytest.approx(test.pvalue)
        assert one.difference.n == count
        within = means[:, 0] - means[:, 1]
        assert (one.least, one.most) == pytest.approx((within.min(), within.max()))


def test_holm_is_over_the_remedies_of_a_cause_and_one_reference() -> None:
    read = lines("remedies_k3", remedies(5))
    assert list(read)[:3] == [("floor, minus naive", "floor_tis"), ("floor, minus naive", "floor_dvp"),
                              ("engine, minus naive", "engine_tis")]  # fmt: skip
    for reference in ("naive", "the matched control", "exact"):
        own = [read[f"floor, minus {reference}", arm] for arm in ("floor_tis", "floor_dvp")]
        assert [one.difference_p_holm for one in own] == holm([one.difference.p for one in own]).tolist()
    alone = read["engine, minus naive", "engine_tis"]
    assert alone.difference_p_holm == alone.difference.p


def test_one_part_is_described_over_its_seeds_and_not_tested() -> None:
    parts = remedies(1)
    (scores,) = (part[POOLED_SCORE] for part in parts.values())
    one = lines("remedies_k3", parts)["floor, minus naive", "floor_dvp"]
    test = stats.ttest_ind(values(scores["floor_dvp"]), values(scores["floor_naive"]), equal_var=False)
    assert (one.difference.low, one.difference.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert math.isnan(one.difference.p) and math.isnan(one.difference_p_holm)
    assert one.least == one.most == pytest.approx(one.difference.mean)


def test_a_part_that_lacks_an_arm_is_left_out_of_its_pairs_alone() -> None:
    parts = remedies(4)
    del parts["2"][POOLED_SCORE]["floor_dvp"]
    read = lines("remedies_k3", parts)
    assert read["floor, minus naive", "floor_dvp"].difference.n == 3
    assert read["floor, minus naive", "floor_tis"].difference.n == 4


def test_differences_that_are_all_zero_have_no_interval() -> None:
    parts = remedies(3)  # as scores at a ceiling
    for part in parts.values():
        part[POOLED_SCORE]["floor_tis"] = part[POOLED_SCORE]["exact"]
    one = lines("remedies_k3", parts)["floor, minus exact", "floor_tis"].difference
    assert (one.mean, one.p) == (0.0, 1.0) and math.isnan(one.low) and math.isnan(one.high)


def test_scores_are_over_parts_or_over_the_seeds_of_one() -> None:
    parts = remedies(5)
    measured = pooled_measures(POOLS["remedies_k3"], parts)
    assert [one.arm for one in measured] == ["base", *REMEDIES]
    for one in measured:
        means = [np.mean(values(part[POOLED_SCORE][one.arm])) for part in parts.values()]
        ends = stats.t.interval(0.95, 4, np.mean(means), stats.sem(means))
        assert (one.value.low, one.value.high) == pytest.approx(ends)
        assert (one.measure, one.part, one.value.n) == (POOLED_SCORE, "", 5)
    alone = remedies(1)
    base, exact, *_ = pooled_measures(POOLS["remedies_k3"], alone)
    scores = alone["1"][POOLED_SCORE]
    assert base.value.mean == scores["base"][0] and math.isnan(base.value.low)
    ends = stats.t.interval(0.95, 3, np.mean(values(scores["exact"])), stats.sem(values(scores["exact"])))
    assert (exact.value.low, exact.value.high) == pytest.approx(ends)


def test_one_seed_a_part_is_a_paired_test_of_seeds() -> None:
    """SmolLM2: with one part there is no interval at all."""
    rng = np.random.default_rng(5)
    arms = ("fp8_naive", "fp8_control", "fp8_token_tis", "fp8_dvp")
    parts = {
        str(n): {POOLED_SCORE: {arm: {299 + n: rng.uniform()} for arm in arms}}
        | {name: {arm: {299 + n: 0.5} for arm in arms} for name in POOLS["smollm2_fp8"].measures}
        for n in (1, 2, 3)
    }
    found = lines("smollm2_fp8", parts)
    assert [*found] == [("harm", "fp8_naive"), ("remedies", "fp8_token_tis"), ("remedies", "fp8_dvp")]
    for one in found.values():
        scores = [part[POOLED_SCORE] for part in parts.values()]
        pairs = [(values(score[one.arm])[0], values(score[one.minus])[0]) for score in scores]
        test = stats.ttest_rel(*np.array(pairs).T)
        assert [one.difference.low, one.difference.high, one.difference.p] == pytest.approx(
            [*test.confidence_interval(0.95), test.pvalue]
        )
    harm, *others = found.values()
    assert harm.difference_p_holm == harm.difference.p
    assert max(one.difference_p_holm for one in others) >= 2 * min(one.difference.p for one in others) - 1e-12
    first = dict(list(parts.items())[:1])
    assert all(math.isnan(one.difference.low) and one.difference.n == 1
               for one in lines("smollm2_fp8", first).values())  # fmt: skip


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.01, 0.0, -0.01), "level"),  # 0 ± 1.69 points
        ((0.01, 0.0, 0.011), "level"),  # 0.7 ± 1.03
        ((0.02, 0.0, 0.022), "not decided"),  # 1.4 ± 2.05
        ((0.04, 0.041, 0.042), "differs"),
        ((-0.04, -0.041, -0.042), "differs"),
        ((0.019, 0.02, 0.0195), "level"),  # above 0, and within the margin
        ((0.029, 0.03, 0.0305), "not decided"),  # above 0, and one end beyond the margin
        ((0.5, -0.5, 0.2), "not decided"),
        ((0.01, 0.01, 0.01), "not decided"),  # no variance, no interval
        ((0.01,), "not decided"),
    ],
)
def test_two_arms_are_level_where_the_90_percent_interval_is_within_the_margin(
    differences: tuple[float, ...], verdict: str
) -> None:
    pool = Pool.model_validate(
        {"title": "t", "families": {"f": {"margins": {"a": 0.03}, "of": [{"arms": ["a", "b"], "minus": "c"}]}}}
    )
    parts: PartNumbers = {
        str(n): {
            POOLED_SCORE: {"a": by_seed([0.5 + one - 0.1, 0.5 + one + 0.1]), "b": by_seed([0.5]), "c": by_seed([0.5])}
        }
        for n, one in enumerate(differences)
    }
    read = pooled_lines(pool, parts)
    (one,) = pooled_equivalences(pool, parts, read)
    n = len(differences)
    error = np.std(differences, ddof=1) / math.sqrt(n) if n > 1 and np.ptp(differences) > 0 else math.nan
    half = stats.t.ppf(0.95, n - 1) * error
    mean = np.mean(differences)
    assert (one.family, one.arm, one.minus, one.margin, one.verdict) == ("f", "a", "c", 0.03, verdict)
    assert one.difference.mean == pytest.approx(mean) and one.difference.n == n
    assert (one.difference.low, one.difference.high) == pytest.approx((mean - half, mean + half), nan_ok=True)
    # Two one-sided tests of 5 % each, by scipy.
    if n > 1 and not math.isnan(error):
        worst = max(
            stats.ttest_1samp(differences, -0.03, alternative="greater").pvalue,
            stats.ttest_1samp(differences, 0.03, alternative="less").pvalue,
        )
        assert (worst <= 0.05) == (verdict == "level")


# --- harm and its size -----------------------------------------------------------------------------------


def test_harm_is_paired_within_parts_and_its_families_are_apart() -> None:
    found = {arm: one for (family, arm), one in lines("causes", causes()).items() if "beyond" not in family}
    assert {arm: one.family for arm, one in found.items()} == {
        arm: "harm at other k3" if arm.endswith("int4") else "harm at the largest k3" for arm in CAUSES
    }
    for arm, lost in LOST.items():
        expected = stats.ttest_1samp(-np.array(lost) / 100, 0.0)
        own = found[arm].difference
        assert [own.mean, own.low, own.high, own.p] == pytest.approx(
            [-np.mean(lost) / 100, *expected.confidence_interval(0.95), expected.pvalue]
        )
    largest = ("both", "noise_both", "stale_both")
    smallest = min(found[arm].difference.p for arm in largest)
    assert min(found[arm].difference_p_holm for arm in largest) == pytest.approx(3 * smallest)


def test_a_cause_is_compared_with_its_engine_and_counts_where_their_k3_are_alike() -> None:
    found = {arm: one for (family, arm), one in lines("causes", causes()).items() if "beyond" in family}
    dialled = ("noise_int4", "noise_both", "stale_both")
    assert {arm: one.counts for arm, one in found.items()} == {arm: arm != "noise_both" for arm in dialled}
    for arm in dialled:
        expected = stats.ttest_rel(*-np.array([LOST[arm], LOST[arm.split("_")[1]]]) / 100)
        own = found[arm].difference
        assert [own.low, own.high, own.p] == pytest.approx([*expected.confidence_interval(0.95), expected.pvalue])
    # Holm is over those that do not count too.
    assert min(one.difference_p_holm for one in found.values()) == pytest.approx(
        3 * min(one.difference.p for one in found.values())
    )


def test_k3_is_a_geometric_mean_over_parts_of_the_means_over_seeds() -> None:
    measured = {one.arm: one.value for one in pooled_measures(POOLS["causes"], causes()) if one.measure == SIZE}
    for arm in CAUSES:
        logs = np.log(K3[arm] * 2 ** np.arange(3))
        half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
        assert (measured[arm].mean, measured[arm].n) == (pytest.approx(2 * K3[arm]), 3)
        assert [measured[arm].low, measured[arm].high] == pytest.approx(
            np.exp([logs.mean() - half, logs.mean() + half])
        )
    alone = {one.arm: one.value for one in pooled_measures(POOLS["causes"], causes(1)) if one.measure == SIZE}
    assert alone["both"].mean == pytest.approx(K3["both"]) and math.isnan(alone["both"].low)


def test_a_missing_arm_leaves_its_part_out_of_what_needs_it() -> None:
    parts = causes()
    del parts["1"][POOLED_SCORE]["both"]
    found = lines("causes", parts)
    assert found["harm at the largest k3", "both"].difference.n == 2
    assert found["harm at the largest k3", "noise_both"].difference.n == 3
    assert found["harm beyond that of the engine", "noise_both"].difference.n == 2


def test_an_engine_without_a_mismatch_is_like_no_cause() -> None:
    parts = causes()
    for part in parts.values():
        part[SIZE]["int4"] = by_seed([0.0, 0.0])
    assert not lines("causes", parts)["harm beyond that of the engine", "noise_int4"].counts
    sizes = {one.arm: one.value for one in pooled_measures(POOLS["causes"], parts) if one.measure == SIZE}
    assert math.isnan(sizes["int4"].mean)


# --- parts side by side ----------------------------------------------------------------------------------

LENGTHS = {"030": 32.0, "060": 58.0, "150": 149.0, "300": 305.0, "500": 500.0}
SIX, THREE = range(310, 316), range(310, 313)


def lengths(
    power: float = 0.5, noise: float = 0.05, seed: int = 7
) -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """|Δ_y| grows with this power of the tokens, and harm with their logarithm."""
    rng = np.random.default_rng(seed)
    made = {}
    for part, tokens in LENGTHS.items():
        scores = {"fp8": {s: 0.8 - 0.02 * math.log(tokens) + 0.03 * rng.standard_normal() for s in SIX}}
        scores["fp8_control"] = {s: 0.8 + 0.03 * rng.standard_normal() for s in SIX}
        for arm in ("exact", "naive", "fp8_token_tis", "fp8_dvp"):
            scores[arm] = {s: 0.8 + 0.03 * rng.standard_normal() for s in THREE}
        length = {s: tokens * math.exp(0.02 * rng.standard_normal()) for s in SIX}
        size = {s: 0.01 * tokens**power * math.exp(noise * rng.standard_normal()) for s in SIX}
        made[part] = {POOLED_SCORE: scores, TOKENS: {"fp8": length}, DELTA: {"fp8": size}, DELTA_SD: {"fp8": size}}
        made[part][ESS] = {"fp8": {s: rng.uniform(0.1, 0.9) for s in SIX}}
    return made


def test_harm_is_welchs_over_seeds_in_each_part_and_holm_is_over_parts() -> None:
    parts = lengths()
    own = [one for one in pooled_lines(POOLS["long"], parts) if one.family == "harm"]
    assert [one.part for one in own] == list(LENGTHS)
    for one in own:
        scores = parts[one.part][POOLED_SCORE]
        test = stats.ttest_ind(values(scores["fp8"]), values(scores["fp8_control"]), equal_var=False)
        assert [one.difference.low, one.difference.high, one.difference.p] == pytest.approx(
            [*test.confidence_interval(0.95), test.pvalue]
        )
    assert [one.difference_p_holm for one in own] == pytest.approx(holm([one.difference.p for one in own]).tolist())


def test_remedies_share_holm_within_a_part() -> None:
    parts = lengths()
    own = [one for one in pooled_lines(POOLS["long"], parts) if one.family.startswith("remedies")]
    assert len(own) == 15
    for part in LENGTHS:
        here = [one for one in own if one.part == part]
        assert [(one.arm, one.minus) for one in here] == [
            ("fp8_token_tis", "fp8"), ("fp8_dvp", "fp8"), ("naive", "exact")
        ]  # fmt: skip
        assert [one.difference_p_holm for one in here] == pytest.approx(
            holm([one.difference.p for one in here]).tolist()
        )
        scores = parts[part][POOLED_SCORE]
        test = stats.ttest_ind(values(scores["fp8_dvp"]), values(scores["fp8"]), equal_var=False)
        assert (here[1].difference.p, here[1].difference.n) == (pytest.approx(test.pvalue), 3)


def test_growth_of_harm_is_welchs_of_four_groups() -> None:
    """By hand: variances over sizes add up, with Satterthwaite's degrees of freedom."""
    parts = lengths()
    (one,) = [one for one in pooled_lines(POOLS["long"], parts) if one.family.startswith("growth")]
    groups = [np.array(values(parts[part][POOLED_SCORE][arm])) for part in ("500", "030")
              for arm in ("fp8", "fp8_control")]  # fmt: skip
    mean = groups[0].mean() - groups[1].mean() - groups[2].mean() + groups[3].mean()
    squares = np.array([group.var(ddof=1) / 6 for group in groups])
    half = stats.t.ppf(0.975, squares.sum() ** 2 / (squares**2 / 5).sum()) * math.sqrt(squares.sum())
    assert one.part == "500 - 030"
    assert [one.difference.mean, one.difference.low, one.difference.high] == pytest.approx(
        [mean, mean - half, mean + half]
    )
    del parts["500"]
    assert not [one for one in pooled_lines(POOLS["long"], parts) if one.family.startswith("growth")]


def test_measures_have_intervals_over_the_seeds_of_each_part() -> None:
    parts = lengths()
    own = [one for one in pooled_measures(POOLS["long"], parts) if one.measure == ESS]
    assert [(one.part, one.arm, one.value.n) for one in own] == [(part, "fp8", 6) for part in LENGTHS]
    for one in own:
        size = values(parts[one.part][ESS]["fp8"])
        ends = stats.t.interval(0.95, 5, np.mean(size), stats.sem(size))
        assert (one.value.low, one.value.high) == pytest.approx(ends)


def test_a_slope_is_that_of_each_seed_by_the_normal_equations() -> None:
    parts = lengths()
    del parts["150"][DELTA]["fp8"][312]
    (one,) = pooled_slopes(POOLS["long"], parts)
    slopes = []
    for seed in (s for s in SIX if s != 312):
        x, y = (np.log([part[name]["fp8"][seed] for part in parts.values()]) for name in (TOKENS, DELTA))
        slopes.append(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    ends = stats.t.interval(0.95, 4, np.mean(slopes), stats.sem(slopes))
    assert (one.arm, one.measure, one.against, one.parts, one.slope.n) == ("fp8", DELTA, TOKENS, 5, 5)
    assert (one.slope.low, one.slope.high) == pytest.approx(ends)
    assert pooled_slopes(POOLS["long"], {"030": parts["030"]}) == []


def test_a_slope_needs_numbers_above_zero() -> None:
    parts = lengths()
    parts["060"][DELTA]["fp8"] = dict.fromkeys(SIX, 0.0)
    (one,) = pooled_slopes(POOLS["long"], parts)
    assert math.isnan(one.slope.mean) and one.slope.n == 0


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_nineteen_of_twenty_intervals_of_a_slope_hold_the_true_one(power: float) -> None:
    """Of 1,000 simulated studies; the binomial's SD is 7 of 1,000."""
    pool: Pool = POOLS["long"]
    held = 0
    rng = np.random.default_rng(11)
    for _ in range(1000):
        parts = {
            part: {
                TOKENS: {"fp8": dict.fromkeys(SIX, tokens)},
                DELTA: {"fp8": {s: 0.01 * tokens**power * math.exp(0.2 * rng.standard_normal()) for s in SIX}},
            }
            for part, tokens in LENGTHS.items()
        }
        (one,) = pooled_slopes(pool, parts)
        held += one.slope.low <= power <= one.slope.high
    assert 925 <= held <= 975


# --- parts that are compared with one --------------------------------------------------------------------


def test_a_change_is_welchs_against_the_first_part_with_holm_over_a_measure() -> None:
    rng = np.random.default_rng(7)
    pool = POOLS["ablate_length"]
    names = (POOLED_SCORE, *pool.measures)
    parts: dict[str, dict[str, dict[str, dict[int, float]]]] = {
        part: {name: {arm: by_seed(level + rng.standard_normal(5)) for arm in ("naive", "dvp")} for name in names}
        for part, level in (("3", 0.0), ("4", 1.0), ("6", 3.0))
    }
    # A constant is not compared, such as naive's mass outside the safe set.
    for part in parts.values():
        part["outside"]["naive"] = by_seed([0.0] * 5)
    changes = pooled_changes(pool, parts)
    assert [(one.measure, one.part, one.arm) for one in changes] == [
        (name, part, arm)
        for name in names
        for arm in ("naive", "dvp")
        for part in ("4", "6")
        if (name, arm) != ("outside", "naive")
    ]
    for one in changes:
        here, there = (values(parts[part][one.measure][one.arm]) for part in (one.part, "3"))
        test = stats.ttest_ind(here, there, equal_var=False)
        assert [one.change.low, one.change.high, one.change.p] == pytest.approx(
            [*test.confidence_interval(0.95), test.pvalue]
        )
    of_score = [one for one in changes if one.measure == POOLED_SCORE]
    assert [one.change_p_holm for one in of_score] == pytest.approx(holm([one.change.p for one in of_score]).tolist())
    del parts["3"]
    assert pooled_changes(pool, parts) == []
