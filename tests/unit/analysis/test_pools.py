"""The pages over parts, as data: they are of studies that exist, and of arms that these have."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrl.analysis.pools import ArmsLess, Pool, pools
from tailrl.config.load import read_study

ROOT = Path(__file__).parents[3]
LEAST = {
    "title": "t",
    "parts": ["a", "b"],
    "noun": "seed",
    "families": {"harm": {"of": [{"arms": ["x"], "less": "y"}]}},
}


def compared(name: str) -> dict[str, list[str]]:
    """What each family compares, from the arms of the pool's first part."""
    pool = pools()[name]
    arms = list(read_study(ROOT / f"studies/{pool.parts[0]}.yaml").arms)
    return {key: [arm for one in family.of for arm in one.chosen(arms)] for key, family in pool.families.items()}


@pytest.mark.parametrize("name", pools())
def test_every_pattern_and_every_reference_is_an_arm_of_every_part(name: str) -> None:
    pool = pools()[name]
    for part in pool.parts:
        arms = list(read_study(ROOT / f"studies/{part}.yaml").arms)
        for family in pool.families.values():
            for one in family.of:
                for pattern in (*one.arms, *one.without):
                    assert any(fnmatchcase(arm, pattern) for arm in arms), (part, pattern)
                assert {word for arm in one.chosen(arms) for word in one.weights(arm)} <= set(arms)


@pytest.mark.parametrize("name", [name for name, pool in pools().items() if pool.unit == "seed"])
def test_parts_that_are_set_side_by_side_have_the_same_seeds(name: str) -> None:
    """Else a slope would have none."""
    assert (
        len({tuple(read_study(ROOT / f"studies/{part}.yaml").arm_seeds().items()) for part in pools()[name].parts}) == 1
    )


def test_the_remedies_of_a_cause_are_its_arms_but_its_references() -> None:
    found = compared("remedies_pooled")
    arms = list(read_study(ROOT / "studies/remedies_k3_1.yaml").arms)
    for cause in ("floor", "engine"):
        own = {arm for arm in arms if arm.startswith(f"{cause}_")} - {f"{cause}_naive", f"{cause}_control"}
        for less in ("naive", "the matched control", "exact"):
            assert len(own) == 10 and set(found[f"{cause}, less {less}"]) == own
    harm = pools()["remedies_pooled"].families["what there was to remedy"]
    naive, control = ("floor_naive", "engine_naive"), ("floor_control", "engine_control")
    assert sorted((arm, one.less) for one in harm.of for arm in one.chosen(arms)) == sorted(
        [*zip(naive, control, strict=True), *((arm, "exact") for arm in (*naive, *control))]
    )


def test_the_families_of_causes_are_those_of_its_header() -> None:
    found = compared("causes_harm")
    assert {name: len(arms) for name, arms in found.items()} == {
        "harm at the largest k3": 5, "harm at other k3": 14, "harm beyond that of the engine": 15
    }  # fmt: skip
    assert set(found["harm at the largest k3"]) == {"both", "noise_both", "bias_both", "floor_both", "stale_both"}
    assert not [arm for arms in found.values() for arm in arms if arm.endswith("_control")]


def test_the_families_of_long_and_of_smollm2() -> None:
    remedies = ["fp8_token_tis", "fp8_mis", "fp8_geometric", "fp8_dvp"]
    found = compared("long_growth")
    assert found["harm"] == found["growth of harm, longest less shortest"] == ["fp8"]
    assert found["remedies, and rounding"] == [*remedies, "naive"]
    assert compared("smollm2_fp8_pooled") == {"harm": ["fp8_naive"], "remedies": ["fp8_token_tis", "fp8_dvp"]}


def test_a_sum_of_arms_as_weights() -> None:
    less = ArmsLess(arms=("*",), less="{arm}_control + {last} - {last}_control")
    assert less.weights("noise_int8") == {"noise_int8": 1, "noise_int8_control": -1, "int8": -1, "int8_control": 1}
    assert ArmsLess(arms=("*",), less="a + a").weights("b") == {"b": 1, "a": -2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"figure": {"x": "k3", "panels": [["harm"]]}}, "no measure or family k3"),
        ({"slopes": [{"of": "a", "against": "a", "arms": ["x"]}]}, "no measure or family a"),
        ({"families": {"harm": {"between": ["a", "c"], "of": [{"arms": ["x"], "less": "y"}]}}}, "no part c"),
        ({"families": {"harm": {"between": ["a", "b"], "of": [{"arms": ["x"], "less": "y"}]}}}, "do not grow"),
        ({"unit": "arm"}, "Input should be 'part' or 'seed'"),
    ],
)
def test_a_page_that_cannot_be(change: dict[str, object], words: str) -> None:
    assert Pool.model_validate(LEAST).tables == ["policies.csv"]
    with pytest.raises(ValidationError, match=words):
        Pool.model_validate(LEAST | change)
