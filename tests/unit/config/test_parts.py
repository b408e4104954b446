"""A part is its study with the part's settings merged in; `pooled` says what the page over parts holds."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
from parts_fixture import IN_PARTS, POOLS, ROOT
from pydantic import ValidationError

from tailrl.config.load import merged, parse_study, read_study
from tailrl.config.pooled import ArmContrast, Pool, arm_weights
from tailrl.runtime.errors import StudyError

LEAST: dict[str, Any] = {
    "name": "s",
    "arms": {"a": {}, "b": {}},
    "description": "part {part}",
    "parts": {1: {}, "x": {}},
}
ABLATION = {"base": "b", "field": "estimator", "values": ["grpo"]}
POOL: dict[str, Any] = {"title": "t", "families": {"harm": {"of": [{"arms": ["x"], "minus": "y"}]}}}


# --- the parts -------------------------------------------------------------------------------------------


def test_a_part_is_the_study_with_its_settings_merged_in() -> None:
    study = parse_study(
        LEAST
        | {
            "policy": {"source": "scratch", "layers": 2},
            "endpoint": "e",
            "parts": {
                1: {"seeds": [7], "policy": {"warm_start": {"seed": 3}}},
                "x": {"arms": {"b": None, "c": {"vocabulary": {"rule": "min_p", "rho": "e-13"}}}, "description": "d"},
                "words": {"task": {"name": "words", "words": [3, 4]}},
            },
        }
    )
    first, second, third = study.each().values()
    assert list(study.each()) == ["s/1", "s/x", "s/words"] == [part.name for part in study.each().values()]
    assert (first.seeds, first.policy.layers, first.policy.warm_start.seed) == ((7,), 2, 3)  # type: ignore[union-attr]
    assert (first.description, second.description, first.endpoint, first.parts) == ("part 1", "d", "", {})
    assert (list(first.arms), list(second.arms)) == (["a", "b"], ["a", "c"])
    # A task of another kind replaces the study's, whose keys it does not have.
    assert third.task.name == "words" and first.task.name == "arithmetic"
    assert first.runs()["a"].study == "s/1"


def test_a_number_and_a_text_name_one_part() -> None:
    """In a file and in one that extends it, or on the command line."""
    below = {"name": "s", "arms": {"a": {}}, "parts": {2: {"seeds": [5], "training": {"steps": 7}}}}
    study = parse_study(merged(below, {"parts": {"2": {"seeds": [9]}}, "pooled": {"title": "t", "parts": [2]}}))
    (part,) = study.each().values()
    assert (part.seeds, part.training.steps) == ((9,), 7)


def test_a_part_replaces_a_preset() -> None:
    """A preset is expanded once the part is merged: else its keys would count as the study's own."""
    arm = {"correction": {"preset": "verl/decoupled_token_is"}}
    other = {"correction": {"preset": "verl/decoupled_geo_rs"}}
    study = parse_study({"name": "s", "arms": {"a": arm}, "parts": {1: {}, 2: {"arms": {"a": other}}}})
    first, second = (part.arms["a"].correction for part in study.each().values())
    assert first == parse_study({"name": "s", "arms": {"a": arm}}).arms["a"].correction
    assert second == parse_study({"name": "s", "arms": {"a": other}}).arms["a"].correction


def test_a_part_leaves_an_ablation_out() -> None:
    parts = {1: {"arms": {"b": None}, "ablations": {"r": None}}, 2: {}}
    first, second = parse_study(LEAST | {"ablations": {"r": ABLATION}, "parts": parts}).each().values()
    assert (list(first.ablations), list(second.ablations)) == ([], ["r"])


def test_a_study_without_parts_is_its_only_one() -> None:
    study = parse_study({"name": "s", "arms": {"a": {}}})
    assert study.each() == {"s": study}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parts": {1: {"seeds": [-1]}}}, "parts.1: seeds.0: "),
        ({"parts": {1: {"sedes": [1]}}}, "parts.1: sedes is not a known key (did you mean 'seeds'?)"),
        ({"parts": {1: {"arms": {"a": None, "b": None}}}}, "parts.1: arms: "),
        ({"parts": {1: {"name": "t"}}}, "parts.1.name: is set for the whole study"),
        ({"parts": {"a b": {}}}, "'a b' cannot name a part: at most 100 letters"),
        ({"parts": {"train": {}}}, "parts.train: is the name of a folder of results; give the part another name"),
        ({"parts": {1: [2]}}, "parts.1: must be a block of keys and values"),
        (
            {"parts": {1: {"training": {"snapshot_every": 5}}, 2: {}}},
            "training.snapshot_every is set in some",
        ),
        ({"parts": {"study_file": {}}}, "parts.study_file: is the name of a folder of results"),
        (
            {
                "parts": {
                    1: {
                        "ablations": {"r": {"base": "b", "field": "estimator", "values": ["grpo"]}},
                        "arms": {"b": None},
                    }
                }
            },
            "there is no arm 'b'",
        ),
        ({"pooled": {"title": "t"}, "makes": ["gradients"]}, "pooled: needs the report of each part"),
        (
            {"pooled": {"title": "t", "families": {"h": {"of": [{"arms": ["x"], "minus": "a"}]}}}},
            "no part has an arm x",
        ),
        ({"pooled": {"title": "t", "families": {"h": {"of": [{"arms": ["a"], "minus": "{foo}"}]}}}}, "an arm {foo}"),
        (
            {"pooled": {"title": "t"}, "parts": {1: {}, 2: {"seeds": [5]}}},
            "pooled: a has 1 seeds in one part, and 3 in",
        ),
        ({"pooled": {"title": "t", "measures": {"avg@k": {"table": "t.csv", "column": "c"}}}}, "avg@k is the score"),
        (
            {
                "pooled": {
                    "title": "t",
                    "measures": {"m": {"table": "t.csv", "column": "c"}},
                    "figure": {"x": "m", "panels": []},
                }
            },
            "pooled.figure.panels: ",
        ),
        ({"name": "s/1"}, "name: needs at most 100 letters, digits, _ . + - (given: 's/1')"),
        ({"pooled": POOL | {"parts": ["3"]}}, "pooled: there is no part 3"),
        ({"pooled": POOL | {"unit": "seed", "against": "3"}}, "pooled: there is no part 3"),
        ({"makes": ["figures"]}, "makes.0: must be one of report, distributions, gradients"),
    ],
)
def test_parts_that_cannot_be_are_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError) as raised:
        parse_study(LEAST | change)
    assert str(raised.value).startswith("the study: ") and words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "pages"),
    [
        ({}, ("report",)),
        ({"distributions": {"engines": {"exact": {"sampler": {"engine": "exact", "dtype": "float32"}}}}},
         ("report", "distributions")),
        ({"makes": ["gradients"]}, ("gradients",)),
    ],
)  # fmt: skip
def test_what_a_study_makes(change: dict[str, Any], pages: tuple[str, ...]) -> None:
    assert parse_study(LEAST | {"parts": {}} | change).pages == pages


# --- the page over them ----------------------------------------------------------------------------------


def compared(name: str) -> dict[str, list[str]]:
    """What each family compares, from the arms of the study's first part."""
    arms = list(next(iter(IN_PARTS[name].each().values())).arms)
    return {key: [arm for one in family.of for arm in one.chosen(arms)] for key, family in POOLS[name].families.items()}


@pytest.mark.parametrize("name", POOLS)
def test_every_pattern_and_every_reference_is_an_arm_of_every_part(name: str) -> None:
    pool, study = POOLS[name], IN_PARTS[name]
    for part in pool.parts or study.parts:
        arms = list(study.each()[f"{name}/{part}"].arms)
        for family in pool.families.values():
            for one in family.of:
                for pattern in (*one.arms, *one.without):
                    assert any(fnmatchcase(arm, pattern) for arm in arms), (part, pattern)
                assert {word for arm in one.chosen(arms) for word in arm_weights(arm, one.minus)} <= {*arms, "base"}


@pytest.mark.parametrize("name", [name for name, pool in POOLS.items() if pool.unit == "seed"])
def test_parts_that_are_set_side_by_side_have_the_same_seeds(name: str) -> None:
    """Else a slope would have none."""
    assert len({tuple(part.arm_seeds().items()) for part in IN_PARTS[name].each().values()}) == 1


def test_the_remedies_of_a_cause_are_its_arms_but_its_references() -> None:
    families = compared("remedies_k3")
    arms = list(read_study(ROOT / "studies/remedies_k3.yaml").arms)
    for cause in ("floor", "engine"):
        remedies = {arm for arm in arms if arm.startswith(f"{cause}_")} - {f"{cause}_naive", f"{cause}_control"}
        for reference in ("naive", "the matched control", "exact"):
            assert len(remedies) == 10 and set(families[f"{cause}, minus {reference}"]) == remedies
    harm = POOLS["remedies_k3"].families["what there was to remedy"]
    naive, control = ("floor_naive", "engine_naive"), ("floor_control", "engine_control")
    assert sorted((arm, one.minus) for one in harm.of for arm in one.chosen(arms)) == sorted(
        [*zip(naive, control, strict=True), *((arm, "exact") for arm in (*naive, *control))]
    )


def test_the_families_of_causes_are_those_of_its_header() -> None:
    families = compared("causes")
    assert {name: len(arms) for name, arms in families.items()} == {
        "harm at the largest k3": 5, "harm at other k3": 14, "harm beyond that of the engine": 15
    }  # fmt: skip
    assert set(families["harm at the largest k3"]) == {"both", "noise_both", "bias_both", "floor_both", "stale_both"}
    assert not [arm for arms in families.values() for arm in arms if arm.endswith("_control")]


def test_the_families_of_long_and_of_smollm2() -> None:
    remedies = ["fp8_token_tis", "fp8_mis", "fp8_geometric", "fp8_dvp"]
    families = compared("long")
    assert families["harm"] == families["growth of harm, longest minus shortest"] == ["fp8"]
    assert families["remedies, and rounding"] == [*remedies, "naive"]
    assert compared("smollm2_fp8") == {"harm": ["fp8_naive"], "remedies": ["fp8_token_tis", "fp8_dvp"]}


def test_a_sum_of_arms_as_weights() -> None:
    contrast = ArmContrast(arms=("*",), minus="{arm}_control + {last} - {last}_control")
    assert arm_weights("noise_int8", contrast.minus) == {
        "noise_int8": 1,
        "noise_int8_control": -1,
        "int8": -1,
        "int8_control": 1,
    }
    assert arm_weights("b", "a + a") == {"b": 1, "a": -2}
    assert ArmContrast(arms=("*",), minus="base").chosen(["base", "a"]) == ["a"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"figure": {"x": "k3", "panels": [["harm"]]}}, "no measure or family k3"),
        ({"slopes": [{"of": "a", "against": "a", "arms": ["x"]}]}, "no measure or family a"),
        ({"families": {"harm": {"between": ["a", "b"], "of": [{"arms": ["x"], "minus": "y"}]}}}, "do not differ"),
        ({"against": "a"}, "do not differ"),
        (
            {"unit": "seed", "families": {"f": {"margins": {"x": 0.02}, "of": [{"arms": ["x"], "minus": "y"}]}}},
            "need part",
        ),
        ({"unit": "arm"}, "Input should be 'part' or 'seed'"),
    ],
)
def test_a_page_that_cannot_be(change: dict[str, object], words: str) -> None:
    assert Pool.model_validate(POOL).tables == ["policies.csv"]
    with pytest.raises(ValidationError, match=words):
        Pool.model_validate(POOL | change)
