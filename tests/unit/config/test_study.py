"""Studies: what is accepted, and the sentence that a mistake gets."""

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tailrl.config.jobs import Evaluation, PolicyFile, Problems, Run
from tailrl.config.load import parse_settings, parse_study, read_study
from tailrl.config.policy import PretrainedPolicy, ScratchPolicy
from tailrl.config.study import Study
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.vocabulary import log_rho as read_log_rho
from tailrl.runtime.errors import StudyError

WHOLE: dict[str, Any] = {
    "name": "whole",
    "seeds": [3, 1],
    "task": {"name": "arithmetic"},
    "policy": {"source": "scratch"},
    "training": {"steps": 7, "learning_rate": 1e-3},
    "arms": {
        "naive": {},
        "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-13"}, "training": {"learning_rate": 1e-4}},
        "mis": {"correction": {"sequence": "mis", "veto": 1e-4}},
    },
    "ablations": {
        "rho": {"base": "dvp", "field": "vocabulary.rho", "values": ["e-13", "0.34/V", 1e-6]},
        "rate": {"base": "mis", "field": "training.learning_rate", "values": [1e-5, 1e-2]},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """WHOLE with the value at a dotted path replaced."""
    study = copy.deepcopy(WHOLE)
    *parents, leaf = path.split(".")
    block = study
    for part in parents:
        block = block.setdefault(part, {})
    block[leaf] = value
    return study


def refusal(config: dict[str, Any]) -> str:
    """The one sentence that a study is refused with."""
    with pytest.raises(StudyError) as caught:
        parse_study(config, "my.yaml")
    sentence = str(caught.value)
    assert sentence.startswith("my.yaml: ")
    assert "\n" not in sentence and "Value error" not in sentence and "pydantic" not in sentence
    return sentence.removeprefix("my.yaml: ")


# --- what is accepted --------------------------------------------------------------------------------


def test_one_arm_is_a_study() -> None:
    study = parse_study({"name": "s", "arms": {"naive": {}}})
    run = study.run("naive")
    assert (run.vocabulary.rule, run.correction.sequence, run.sampler.engine) == ("full", "none", "vllm")
    assert run.training == study.training
    assert isinstance(study.policy, ScratchPolicy)


def test_the_config_is_left_as_it_was() -> None:
    config = copy.deepcopy(WHOLE)
    parse_study(config)
    assert config == WHOLE


def test_an_arms_overrides_are_merged() -> None:
    study = parse_study(WHOLE)
    assert study.run("dvp").training == study.training.model_copy(update={"learning_rate": 1e-4})
    assert study.run("naive").training.learning_rate == 1e-3
    assert {study.run(arm).training.steps for arm in study.all_arms()} == {7}


def test_ablation_arms() -> None:
    study = parse_study(WHOLE)
    arms = study.ablation_arms("rho")
    # A value that makes the base arm again is that arm, which is not trained twice.
    assert list(arms) == ["dvp", "rho=0.34-V", "rho=1e-06"]
    assert [arm.vocabulary.rho for arm in arms.values()] == ["e-13", "0.34/V", "1e-06"]
    assert all(arm.training == {"learning_rate": 1e-4} for arm in arms.values())
    assert study.run("rate=0.01").training.learning_rate == 1e-2
    assert study.run("rate=0.01").correction == study.arms["mis"].correction
    assert list(study.all_arms()) == [*WHOLE["arms"], "rho=0.34-V", "rho=1e-06", "rate=1e-05", "rate=0.01"]
    assert study.arms["dvp"].vocabulary.rho == "e-13"


def test_a_value_that_the_study_has_anyway_is_its_base_arm() -> None:
    rate = {"base": ["naive", "dvp"], "field": "training.learning_rate", "values": [1e-3, 1e-4]}
    arms = parse_study({**WHOLE, "ablations": {"rate": rate}}).ablation_arms("rate")
    assert list(arms) == ["naive", "naive+rate=0.0001", "dvp+rate=0.001", "dvp"]


def test_an_ablation_of_several_arms_is_each_with_each_value() -> None:
    ablation = {"base": ["naive", "mis"], "field": "disturbance.floor", "values": [0.0, 0.1]}
    arms = parse_study({**WHOLE, "ablations": {"dose": ablation}}).ablation_arms("dose")
    assert list(arms) == ["naive", "naive+dose=0.1", "mis", "mis+dose=0.1"]
    assert [arm.disturbance.floor for arm in arms.values()] == [0.0, 0.1, 0.0, 0.1]
    assert arms["mis+dose=0.1"].correction == arms["mis"].correction
    with pytest.raises(StudyError, match=r"ablations\.dose\.base: there is no arm 'miss' \(did you mean 'mis'\?\)"):
        parse_study({**WHOLE, "ablations": {"dose": {**ablation, "base": ["naive", "miss"]}}})
    with pytest.raises(StudyError, match=r"ablations\.dose"):
        parse_study({**WHOLE, "ablations": {"dose": {**ablation, "base": []}}})


def test_an_arm_with_its_own_seeds() -> None:
    """They say which runs there are, and are no setting of a run. An ablation of the arm has them too."""
    ablation = {"base": "mis", "field": "disturbance.floor", "values": [0.0, 0.1]}
    own = {**WHOLE, "arms": {**WHOLE["arms"], "mis": {**WHOLE["arms"]["mis"], "seeds": [5, 6, 7, 8]}}}
    study, plain = (parse_study({**whole, "ablations": {"dose": ablation}}) for whole in (own, WHOLE))
    assert {arm: study.arm_seeds()[arm] for arm in ("naive", "mis", "dose=0.1")} == {
        "naive": (3, 1),
        "mis": (5, 6, 7, 8),
        "dose=0.1": (5, 6, 7, 8),
    }
    assert study.runs() == plain.runs()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("e-13", -13.0), ("e-0.5", -0.5), ("1e-6", math.log(1e-6)), ("1", 0.0), ("0.34/V", math.log(0.34 / 151936))],
)
def test_log_rho(text: str, expected: float) -> None:
    assert read_log_rho(text, 151936) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "'1e-6'"])
def test_rho_may_be_a_number_in_the_yaml(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads 1e-6 as text and 1.0e-6 as a number."""
    file = tmp_path / "study.yaml"
    file.write_text(f"{{name: s, arms: {{dvp: {{vocabulary: {{rule: min_p, rho: {text}}}}}}}}}", encoding="utf-8")
    vocabulary = read_study(file).arms["dvp"].vocabulary
    assert vocabulary.threshold(2048) == pytest.approx(math.log(1e-6))
    assert parse_study(WHOLE).arms["naive"].vocabulary.threshold(2048) == 0


def test_problems_and_files() -> None:
    study = parse_study(changed("task", {"name": "dapo_math", "path": "/nowhere/dapo.parquet"}))
    assert study.local_files() == ["/nowhere/dapo.parquet"]
    with pytest.raises(StudyError, match=r"^task\.path: there is no data file /nowhere/dapo\.parquet$"):
        study.check_files()
    assert study.problems().warm_start == study.policy.warm_start.stages  # type: ignore[union-attr]
    pretrained = parse_study(changed("policy", {"source": "pretrained", "path": "some/model"}))
    assert pretrained.problems().warm_start == ()
    assert isinstance(pretrained.policy, PretrainedPolicy)
    parse_study(WHOLE).check_files()


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key", "known"),
    [
        ("", "trainning", "training"),
        ("training", "learning_rat", "learning_rate"),
        ("arms.dvp", "vocabulry", "vocabulary"),
        ("arms.dvp.vocabulary", "roh", "rho"),
        ("arms.mis.correction", "sequence_treshold", "sequence_threshold"),
        ("policy", "hidden_sise", "hidden_size"),
        ("policy.warm_start", "bacth", "batch"),
        ("task", "problem", "problems"),
        ("evaluation.sampler", "dtyp", "dtype"),
        ("ablations.rho", "feild", "field"),
    ],
)
def test_a_misspelt_key_is_named_and_the_right_one_suggested(path: str, key: str, known: str) -> None:
    sentence = refusal(changed(f"{path}.{key}".removeprefix("."), 1))
    assert sentence == f"{path}.{key} is not a known key (did you mean {known!r}?)".lstrip(".")


def test_a_misspelt_override_names_the_arm() -> None:
    sentence = refusal(changed("arms.dvp.training", {"learnin_rate": 1}))
    assert sentence.startswith("arms.dvp.training: learnin_rate is not a known key")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("arms.naive.vocabulary", {"rho": "e-13"}, "arms.naive.vocabulary: rule: full does not use rho"),
        ("arms.naive.vocabulary", {"rule": "min_p"}, "arms.naive.vocabulary.rho is missing"),
        (
            "arms.naive.vocabulary",
            {"outside": "paper_fill"},
            "outside and side say nothing with rule: full (nothing is pruned)",
        ),
        ("arms.dvp.vocabulary.rho", 0, "with a value in (0, 1]"),
        ("arms.dvp.vocabulary.rho", "0/V", "with a value in (0, 1]"),
        ("arms.dvp.vocabulary.rho", 1.5, "with a value in (0, 1]"),
        ("arms.dvp.vocabulary.rho", "e13", "with a value in (0, 1]"),
        ("arms.dvp.vocabulary.rho", "exp(-13)", "write e-13, 1e-6 or 0.34/V"),
        ("arms.dvp.vocabulary.rho", "-1e-6", "write e-13, 1e-6 or 0.34/V"),
        ("arms.dvp.vocabulary.rho", True, "arms.dvp.vocabulary.rho"),
        ("arms.dvp.vocabulary.rho", math.nan, "write e-13, 1e-6 or 0.34/V"),
        (
            "arms.mis.correction.sequence_threshold",
            -2,
            "arms.mis.correction.sequence_threshold: Input should be greater than 0",
        ),
        ("arms.mis.correction.veto", 1.0, "arms.mis.correction.veto"),
        ("arms.mis.correction.token", "mis", "must be one of none, is, tis, mask (given: 'mis') (did you mean 'is'?)"),
        ("arms.dvp.training.steps", 0, "arms.dvp.training: steps: Input should be greater than or equal to 1"),
        ("arms.base", {}, "'base' cannot name an arm"),
        ("arms.a/b", {}, "'a/b' cannot name an arm"),
        ("arms", {}, "arms: "),
        ("name", "../up", "name: "),
        ("seeds", [0, 1, 0], "the same seed is given twice"),
        ("seeds", [], "seeds: "),
        ("arms.mis.seeds", [], "arms.mis.seeds: "),
        ("arms.mis.seeds", [2, 2], "arms.mis.seeds: the same seed is given twice: [2, 2]"),
        ("seeds", [0.5], "seeds.0: "),
        ("policy.heads", 3, "hidden_size / heads must be 32, 64 or 128"),
        ("policy", {"source": "pretrained"}, "policy.path is missing"),
        ("policy", {"source": "gguf"}, "policy.source: "),
        ("task.terms", [4, 2], "needs two numbers from 2 to 6"),
        ("task", {"name": "arithmetics"}, "task.name: "),
        ("training.group_size", 1, "training.group_size: Input should be greater than or equal to 2"),
        ("ablations.rho.base", "dpv", "ablations.rho.base: there is no arm 'dpv' (did you mean 'dvp'?)"),
        (
            "ablations.rho.field",
            "vocabulary.roh",
            "ablations.rho.field: an arm has no field 'vocabulary.roh' (did you mean 'rho'?)",
        ),
        (
            "ablations.rho.field",
            "training.stepz",
            "ablations.rho.field: an arm has no field 'training.stepz' (did you mean 'steps'?)",
        ),
        ("ablations.rho.field", "vocabulry.rho", "no field 'vocabulry.rho' (did you mean 'vocabulary'?)"),
        ("ablations.rho.field", "vocabulary.rho.x", "an arm has no field"),
        ("ablations.rho.field", "", "an arm has no field ''"),
        ("ablations.rho.values", ["e-13", 2], "ablations.rho, value 2: vocabulary.rho: write e-13, 1e-6 or 0.34/V"),
        ("ablations.rho.values", [], "ablations.rho.values: "),
        ("ablations.rho.values", ["0.1", 0.1], "value 0.1 makes the same arm as an earlier one"),
        ("ablations.rate.values", [1e-5, -1.0], "arms.rate=-1.0.training: learning_rate: Input should be greater"),
        ("training.prompts", 5000, "training.prompts: 5000 prompts a step, but the task has 4096"),
        ("arms.mis.training", {"prompts": 5000}, "arms.mis.training.prompts: 5000 prompts a step"),
        ("evaluation.max_new_tokens", 256, "evaluation.max_new_tokens: 256 new tokens do not fit the policy's 256"),
        ("training.max_new_tokens", 300, "training.max_new_tokens: 300 new tokens do not fit the policy's 256"),
        ("arms.mis.training", {"max_new_tokens": 300}, "arms.mis.training.max_new_tokens: 300 new tokens"),
        ("baselines", [0.3, 0.3], "baselines: the same temperature is given twice: [0.3, 0.3]"),
        ("baselines", [0.0], "baselines: temperature: Input should be greater than or equal to 0.01"),
        ("baselines", [2.5], "baselines: temperature: 2.5 is above 2, the largest that vllm takes"),
    ],
)
def test_what_is_impossible_is_one_sentence(path: str, value: Any, words: str) -> None:
    assert words in refusal(changed(path, value))


@pytest.mark.parametrize("correction", [{"sequence": "mis"}, {"veto": 1e-4}])
def test_the_papers_fill_beside_a_correction_is_refused(correction: dict[str, Any]) -> None:
    vocabulary = {"rule": "min_p", "rho": "e-13", "outside": "paper_fill"}
    parse_study(changed("arms.fill", {"vocabulary": vocabulary}))
    sentence = refusal(changed("arms.fill", {"vocabulary": vocabulary, "correction": correction}))
    assert sentence.startswith("arms.fill: vocabulary.outside: paper_fill has no effect beside")


def test_several_mistakes_are_all_named() -> None:
    config = changed("training.stepz", 1)
    config["arms"]["dvp"]["vocabulary"]["rho"] = "x"
    config["seeds"] = "none"
    assert all(words in refusal(config) for words in ("training.stepz", "arms.dvp.vocabulary", "seeds"))


def test_what_must_be_given() -> None:
    assert refusal({}) == "name is missing; arms is missing"


def test_a_rho_over_one_for_the_vocabulary_is_refused() -> None:
    """900/V is 1.5 for 600 tokens: no token would be safe."""
    config = changed("arms.dvp.vocabulary.rho", "900/V")
    config["policy"]["vocabulary_size"] = 600
    assert refusal(config) == "arms.dvp.vocabulary: a rho of 900/V is above 1 for 600 tokens"


@pytest.mark.parametrize(("path", "value"), [("task", {"problems": 9}), ("policy", {"layers": 2})])
def test_the_kind_of_a_policy_or_task_has_a_default(path: str, value: dict[str, int]) -> None:
    study = parse_study(changed(path, value)).model_dump()
    assert study[path].items() >= value.items()


def test_extends_is_for_files() -> None:
    assert "extends: only a file can extend another one" in refusal({**WHOLE, "extends": "other.yaml"})


def test_a_baseline_differs_from_the_evaluation_in_its_temperature_alone() -> None:
    study = parse_study({**WHOLE, "baselines": [0.01, 0.3], "evaluation": {"samples": 4}})
    cold, cool = study.baseline_evaluations().items()
    assert cool == ("base@0.3", Evaluation(samples=4, temperature=0.3))
    assert cold == ("base@0.01", Evaluation(samples=4, temperature=0.01))


# --- JSON ---------------------------------------------------------------------------------------------


def test_settings_survive_json(tmp_path: Path) -> None:
    study = parse_study(WHOLE)
    for arm in study.all_arms():
        run = study.run(arm)
        assert parse_settings(Run, run.model_dump_json()) == run
    assert parse_settings(Study, study.model_dump_json()) == study
    assert parse_settings(Problems, study.problems().model_dump_json()) == study.problems()
    assert parse_settings(Evaluation, study.evaluation.model_dump_json()) == study.evaluation
    (tmp_path / "policy.json").write_text(PolicyFile(policy=study.policy).model_dump_json(), encoding="utf-8")
    assert parse_settings(PolicyFile, str(tmp_path / "policy.json")).policy == study.policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Evaluation settings: Invalid JSON"),
        ('{"sample": 3}', "Evaluation settings: sample is not a known key (did you mean 'samples'?)"),
        ('{"samples": 0}', "Evaluation settings: samples: Input should be greater than or equal to 1 (given: 0)"),
        ("nowhere.json", "nowhere.json: cannot be read: No such file or directory"),
    ],
)
def test_bad_settings_are_one_sentence(text: str, words: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_settings(Evaluation, text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_settings_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ArithmeticTask().problems = 3  # type: ignore[misc]


def test_a_thousand_arms_are_read_in_seconds() -> None:
    """Each once: 200 values took 16 s when every arm was compared with every other, anew for each run."""
    values = [rate / 1e7 for rate in range(1, 1000)]
    ablation = {"base": "a", "field": "training.learning_rate", "values": values}
    started = time.process_time()
    study = parse_study({"name": "s", "arms": {"a": {}}, "ablations": {"x": ablation}})
    assert [run.training.learning_rate for run in study.runs().values()] == [1e-4, *values]
    assert time.process_time() - started < 30


def test_a_policys_folder_holds_all_its_parts(tmp_path: Path) -> None:
    """`tailrl check` says what is missing, before any job."""
    study = parse_study({"name": "s", "policy": {"source": "pretrained", "path": str(tmp_path)}, "arms": {"a": {}}})
    for name, lacking in {
        "config.json": "config.json",
        "model.safetensors": "weights",
        "tokenizer.json": "tokenizer",
    }.items():
        with pytest.raises(StudyError, match=f"^policy.path: {tmp_path}: it holds no {lacking}"):
            study.check_files()
        (tmp_path / name).touch()
    study.check_files()
