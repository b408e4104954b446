"""Arms that would be biased, or that say something without effect: each is refused with the reason."""

import math
from typing import Any

import pytest
from refusal_fixture import FILL, MIN_P, refusal, study_with

from tailrl.config.load import parse_study
from tailrl.config.vocabulary import MinP
from tailrl.runtime.errors import StudyError

# --- what is biased ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["sampler", "trainer"])
@pytest.mark.parametrize(
    "vocabulary", [MIN_P, {"rule": "entropy", "rho": "e-5"}, {"rule": "top_k", "k": 5}, {"rule": "top_p", "p": 0.9}]
)
def test_one_side_alone_is_refused_unless_it_is_meant(vocabulary: dict[str, Any], side: str) -> None:
    arm = {"vocabulary": {**vocabulary, "side": side}}
    assert refusal(arm) == (
        f"arms.a: vocabulary.side: {side} samples from one distribution and trains another, which multiplies every "
        "ratio by the kept mass; prune on both sides, or say deliberate: true"
    )
    assert study_with({**arm, "deliberate": True}).run("a").vocabulary.side == side
    assert study_with({"vocabulary": {**vocabulary, "side": "both"}})


RATIOS = [{"token": "tis"}, {"token": "mask"}, {"sequence": "is"}, {"sequence": "tis"}, {"sequence": "mis"}]
NO_RATIOS = [{}, {"veto": 1e-4}, {"sequence": "reject_k1"}, {"sequence": "reject_k3"}, {"sequence": "geometric"}]


@pytest.mark.parametrize("correction", RATIOS + NO_RATIOS)
def test_several_minibatches_need_a_ratio(correction: dict[str, Any]) -> None:
    """A veto or a rejection alone is no ratio."""
    arm = {"correction": correction}
    assert study_with(arm, minibatches=1)
    if correction in RATIOS:
        assert study_with(arm, minibatches=2)
        return
    assert refusal(arm, minibatches=2) == (
        "arms.a: with 2 minibatches all but the first train on responses of an older policy; "
        "add clip or a weight by the ratio, or say deliberate: true"
    )
    assert study_with({**arm, "deliberate": True}, minibatches=2)
    for ratio in ("recompute", "bypass", "decoupled"):
        assert study_with({**arm, "clip": {"ratio": ratio}}, minibatches=2)


def test_r_ppo_takes_several_updates_and_a_policy_scored_before_them() -> None:
    arm = {"clip": {"ratio": "recompute"}, "correction": {"sequence": "reject_k3", "rejects": "r_ppo"}}
    assert study_with(arm, minibatches=2)
    sentence = (
        "arms.a: correction.rejects: r_ppo is 1 in the first update on a step's rollouts; it needs "
        "training.minibatches above 1 and clip.ratio: recompute or decoupled"
    )
    assert refusal(arm, minibatches=1) == sentence
    assert refusal({**arm, "clip": {"ratio": "bypass"}}, minibatches=2) == sentence
    assert refusal({"correction": {"sequence": "mis", "rejects": "r_ppo"}}).endswith(
        "sequence: mis does not use rejects"
    )


def test_a_delayed_gradient_is_one_a_step() -> None:
    arm = {"clip": {"ratio": "bypass"}, "disturbance": {"staleness": 2, "side": "both"}}
    assert study_with(arm, minibatches=1)
    assert refusal(arm, minibatches=2) == (
        "arms.a: with disturbance.side: both, staleness takes one gradient a step, at the engine's old weights; "
        "set minibatches: 1"
    )


def test_minibatches_of_an_arm_are_checked_too() -> None:
    assert refusal({"training": {"minibatches": 2}}).startswith("arms.a: with 2 minibatches")
    assert refusal({"clip": {"ratio": "bypass"}}, prompts=2, group_size=2, minibatches=5) == (
        "arms.a: more minibatches than responses a step"
    )
    assert study_with({"clip": {"ratio": "bypass"}}, prompts=2, group_size=2, minibatches=4)


@pytest.mark.parametrize("ratio", ["bypass", "decoupled"])
def test_a_clip_beside_a_weight_would_divide_twice(ratio: str) -> None:
    for correction in RATIOS:
        for deliberate in (False, True):
            arm = {"clip": {"ratio": ratio}, "correction": correction, "deliberate": deliberate}
            assert refusal(arm) == (
                f"arms.a: clip.ratio: {ratio} already divides by the sampler's probability; "
                "a weight by the ratio would do so twice"
            )
        assert study_with({"clip": {"ratio": "recompute"}, "correction": correction})
    for correction in NO_RATIOS:
        assert study_with({"clip": {"ratio": ratio}, "correction": correction})


# --- disturbances --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disturbance", "words"),
    [
        ({"side": "both"}, "side: both says nothing where no cause is on"),
        ({"side": "both", "noise": 0.0}, "side: both says nothing where no cause is on"),
    ],
)
def test_a_control_that_there_is_not(disturbance: dict[str, Any], words: str) -> None:
    for deliberate in (False, True):
        sentence = refusal({"disturbance": disturbance, "deliberate": deliberate})
        assert sentence.startswith(f"arms.a.disturbance: {words}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_what_the_engine_holds_anyway_has_no_effect(dtype: str) -> None:
    arm = {"sampler": {"dtype": dtype}, "disturbance": {"weights": dtype}}
    assert refusal(arm) == (
        f"arms.a: disturbance.weights: {dtype} has no effect beside sampler.dtype: {dtype}, "
        "in which the engine holds its weights anyway"
    )
    assert study_with({**arm, "disturbance": {"weights": dtype, "side": "both"}}), "the trainer's are then rounded too"
    assert study_with({"sampler": {"dtype": "float32"}, "disturbance": {"weights": dtype}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("noise", -0.1),
        ("noise", math.inf),
        ("noise", math.nan),
        ("bias", -1.0),
        ("floor", 1.0),
        ("floor", -0.1),
        ("staleness", -1),
        ("staleness", 1.5),
        ("weights", "float64"),
        ("side", "trainer"),
    ],
)
def test_disturbances_out_of_range(key: str, value: object) -> None:
    assert refusal({"disturbance": {key: value}}).startswith(f"arms.a.disturbance.{key}: ")


def test_a_floor_that_defeats_pruning() -> None:
    """2,048 tokens: at η = 0.1 each has 4.9e-5, more than e⁻¹³ of any probability, so that min-p keeps them all."""
    arm: dict[str, Any] = {"vocabulary": MIN_P, "disturbance": {"floor": 0.1}}
    assert refusal(arm) == (
        "arms.a.disturbance: a floor of 0.1 gives each of 2048 tokens at least rho times the largest probability, so "
        "that min_p prunes nothing; raise rho, lower the floor, or say deliberate: true"
    )
    assert study_with({**arm, "deliberate": True})
    for vocabulary, side in (({"rule": "entropy", "rho": "e-13"}, "sampler"), (MIN_P, "both")):
        sentence = refusal({"vocabulary": vocabulary, "disturbance": {"floor": 0.1, "side": side}})
        assert sentence.endswith("or say deliberate: true")
    # Only the trainer prunes, and only the sampler has the floor: they do not meet.
    trainer = {**arm, "vocabulary": {**MIN_P, "side": "trainer"}}
    assert not study_with({**trainer, "deliberate": True}).run("a").floor_defeats_pruning(2048)


@pytest.mark.parametrize(
    ("vocabulary", "admitted"),
    [
        ({"rule": "min_p", "rho": "e-9"}, True),
        ({"rule": "full"}, True),
        ({"rule": "top_k", "k": 5}, True),
        ({"rule": "top_p", "p": 0.9}, True),
        # Difficult prompts are not pruned, easy ones are; a budget moves rho by itself.
        ({**MIN_P, "adapt": "difficulty", "rho_easy": "e-5"}, True),
        ({**MIN_P, "adapt": "difficulty", "rho_easy": "e-11"}, False),
        ({**MIN_P, "adapt": "budget", "budget": 0.1}, True),
    ],
)
def test_a_floor_that_leaves_something_to_prune(vocabulary: dict[str, Any], admitted: bool) -> None:
    arm = {"vocabulary": vocabulary, "disturbance": {"floor": 0.1}}
    if admitted:
        assert study_with(arm)
    else:
        assert "prunes nothing" in refusal(arm)


@pytest.mark.parametrize("eta", [1e-6, 0.01, 0.5, 0.999])
def test_the_edge_of_a_floor_that_defeats_pruning(eta: float) -> None:
    """A state that is sure of one token is where min-p prunes most: brute force over its two probabilities."""
    size = 50
    for factor, defeated in ((0.999, True), (1.001, False)):
        rho = factor * (eta / size) / (1 - eta + eta / size)
        study = {"name": "s", "policy": {"vocabulary_size": 600}, "arms": {"a": {}}}
        run = parse_study(study).run("a")
        vocabulary = MinP.model_construct(rule="min_p", rho=repr(rho))
        disturbance = run.disturbance.model_copy(update={"floor": eta})
        run = run.model_copy(update={"vocabulary": vocabulary, "disturbance": disturbance})
        assert run.floor_defeats_pruning(size) == defeated
        assert (eta / size >= rho * (1 - eta + eta / size)) == defeated


# --- what has no effect --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beside",
    [
        {"correction": {"token": "tis"}},
        {"correction": {"sequence": "geometric"}},
        {"correction": {"veto": 1e-4}},
        {"clip": {"ratio": "recompute"}},
        {"clip": {"ratio": "bypass"}},
        {"clip": {"ratio": "decoupled"}},
    ],
)
def test_the_papers_fill_has_no_effect_beside_a_ratio(beside: dict[str, Any]) -> None:
    assert study_with({"vocabulary": FILL})
    assert refusal({"vocabulary": FILL, **beside}) == (
        "arms.a: vocabulary.outside: paper_fill has no effect beside a correction, a veto or a clipped ratio, "
        "which give a sequence with an outside token weight 0"
    )


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        ({"rule": "full", "rho": "e-13"}, "rule: full does not use rho"),
        ({"rule": "full", "k": 3}, "rule: full does not use k"),
        ({"rule": "full", "p": 0.5}, "rule: full does not use p"),
        ({"rule": "min_p"}, "rho is missing"),
        ({"rule": "entropy"}, "rho is missing"),
        ({"rule": "top_k"}, "k is missing"),
        ({"rule": "top_p"}, "p is missing"),
        ({"rule": "top_k", "k": 3, "rho": "e-13"}, "rule: top_k does not use rho"),
        ({"rule": "top_p", "p": 0.5, "k": 3}, "rule: top_p does not use k"),
        ({**MIN_P, "p": 0.5}, "rule: min_p does not use p"),
        ({"rule": "full", "side": "sampler"}, "outside and side say nothing with rule: full (nothing is pruned)"),
        ({"rule": "full", "outside": "paper_fill"}, "outside and side say nothing with rule: full"),
        ({**MIN_P, "budget": 0.1}, "adapt: none does not use budget"),
        ({**MIN_P, "rho_easy": "e-5"}, "adapt: none does not use rho_easy"),
        ({**MIN_P, "adapt": "budget"}, "adapt: budget needs budget"),
        ({**MIN_P, "adapt": "difficulty"}, "adapt: difficulty needs rho_easy"),
        ({**MIN_P, "adapt": "budget", "budget": 0.1, "rho_easy": "e-5"}, "adapt: budget does not use rho_easy"),
        ({**MIN_P, "adapt": "difficulty", "budget": 0.1, "rho_easy": "e-5"}, "adapt: difficulty does not use budget"),
        ({"rule": "top_k", "k": 3, "adapt": "budget"}, "rule: top_k does not use adapt"),
        ({"rule": "top_p", "p": 0.5, "rho_easy": "e-5"}, "rule: top_p does not use rho_easy"),
        ({"rule": "full", "adapt": "budget"}, "rule: full does not use adapt"),
    ],
)
def test_numbers_that_do_not_fit_their_rule(vocabulary: dict[str, Any], words: str) -> None:
    sentence = refusal({"vocabulary": vocabulary, "deliberate": True})
    assert sentence.startswith("arms.a.vocabulary") and words in sentence


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("k", 0, "greater than or equal to 1"),
        ("p", 0.0, "greater than 0"),
        ("p", 1.1, "less than or equal to 1"),
        ("budget", 0.0, "greater than 0"),
        ("rho_easy", "2", "write e-13, 1e-6 or 0.34/V, with a value in (0, 1]"),
        ("rho_easy", math.nan, "write e-13, 1e-6 or 0.34/V"),
    ],
)
def test_numbers_out_of_range(key: str, value: object, words: str) -> None:
    rule = {"k": {"rule": "top_k"}, "p": {"rule": "top_p"}}.get(key, MIN_P)
    sentence = refusal({"vocabulary": {**rule, key: value}})
    assert sentence.startswith(f"arms.a.vocabulary.{key}: ") and words in sentence


@pytest.mark.parametrize("key", ["rho", "rho_easy"])
def test_a_rho_over_one_for_the_vocabulary(key: str) -> None:
    """900/V is 0.9 for a thousand tokens, and 1.5 for 600."""
    vocabulary = {**MIN_P, "adapt": "difficulty", "rho_easy": "e-5", key: "900/V"}
    study = {"name": "s", "arms": {"a": {"vocabulary": vocabulary}}}
    assert parse_study({**study, "policy": {"vocabulary_size": 1000}})
    with pytest.raises(StudyError, match=r"^x: arms\.a\.vocabulary: a rho of 900/V is above 1 for 600 tokens$"):
        parse_study({**study, "policy": {"vocabulary_size": 600}}, "x")


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"estimator": "ppo"}, "arms.a.estimator: must be one of rloo, reinforce, grpo"),
        ({"clip": {}}, "arms.a.clip.ratio is missing"),
        ({"clip": {"ratio": "old"}}, "arms.a.clip.ratio: "),
        (
            {"clip": {"ratio": "decoupled", "loss": "vespo"}},
            "arms.a.clip: loss: vespo with ratio: bypass weighs by the",
        ),
        ({"clip": {"ratio": "bypass", "low": 1.0}}, "arms.a.clip.low: Input should be less than 1"),
        ({"clip": {"ratio": "bypass", "high": 0.0}}, "arms.a.clip.high: Input should be greater than 0"),
        ({"correction": {"token_threshold": 1.0}}, "arms.a.correction.token_threshold: Input should be greater than 1"),
        ({"vocabulary": {"rule": "typical"}}, "arms.a.vocabulary.rule: "),
    ],
)
def test_values_that_there_are_not(arm: dict[str, Any], words: str) -> None:
    assert refusal(arm).startswith(words)


def test_a_budget_needs_a_trainer_that_prunes() -> None:
    vocabulary = {"rule": "min_p", "rho": "e-13", "adapt": "budget", "budget": 0.01, "side": "sampler"}
    assert "budget is measured in the trainer" in refusal({"vocabulary": vocabulary, "deliberate": True})


# --- what the exact engine cannot meet ---------------------------------------------------------------


@pytest.mark.parametrize("sampler", [{"engine": "exact", "dtype": "float32"}, {"verify": True}])
def test_the_trainers_own_bits_are_float32(sampler: dict[str, Any]) -> None:
    assert refusal({"sampler": sampler}, dtype="bfloat16") == (
        "arms.a: an engine with the trainer's own bits has them in float32 alone; set training.dtype: float32, or "
        "sample with another engine and without verify"
    )
    own = {"sampler": sampler, "training": {"dtype": "float32"}}
    assert study_with(own, dtype="bfloat16").run("a").training.dtype == "float32"
    assert study_with({}, dtype="bfloat16").run("a").training.dtype == "bfloat16"


def test_a_temperature_that_vllm_refuses() -> None:
    for engine in ({"engine": "transformers"}, {"engine": "exact", "dtype": "float32"}):
        assert study_with({"sampler": engine}, temperature=7.0)
    assert study_with({}, temperature=2.0)
    assert refusal({}, temperature=2.5).startswith("arms.a: training.temperature: 2.5 is above 2, the largest that")
    assert "training.temperature: 3" in refusal({"training": {"temperature": 3}, "sampler": {"verify": True}})
    with pytest.raises(
        StudyError, match=r"^the study: evaluation: temperature: 2\.01 is above 2, the largest that vllm"
    ):
        parse_study({"name": "s", "arms": {"a": {}}, "evaluation": {"temperature": 2.01}})
