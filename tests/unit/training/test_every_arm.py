"""Every estimator × clip × correction × vocabulary × disturbance: what is admitted trains, what is refused says why.

All combinations are validated. Those that are admitted are too many to train in a test, so a covering subset is: every
pair of choices that any admitted arm has together, such as (grpo, decoupled) or (top_p, reject_k3), is in an arm that
trains two steps. The rest of the suite holds each choice to its definition by itself.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from sampler_fixture import PlainSampler
from step_fixture import run_of

from tailrl.errors import StudyError
from tailrl.metrics import METRICS
from tailrl.objective.advantages import ESTIMATORS
from tailrl.objective.corrections import SEQUENCE_WEIGHTS, TOKEN_WEIGHTS
from tailrl.records import Problem, write_problems
from tailrl.settings import Arm
from tailrl.study import parse_study
from tailrl.training.loop import train
from tailrl.vocabulary import RULES

Choice = dict[str, Any]

MIN_P: Choice = {"rule": "min_p", "rho": 0.22}
VOCABULARIES: dict[str, Choice] = {
    "full": {"rule": "full"},
    "min_p": MIN_P,
    "entropy": {"rule": "entropy", "rho": 0.5},
    "top_k": {"rule": "top_k", "k": 200},
    "top_p": {"rule": "top_p", "p": 0.7},
    "paper_fill": {**MIN_P, "outside": "paper_fill"},
    "budget": {"rule": "min_p", "rho": 0.4, "adapt": "budget", "budget": 0.05},
    "difficulty": {"rule": "entropy", "rho": 0.6, "adapt": "difficulty", "rho_easy": 0.9},
    "sampler": {**MIN_P, "side": "sampler"},
    "trainer": {**MIN_P, "side": "trainer"},
    "fill_trainer": {**MIN_P, "side": "trainer", "outside": "paper_fill"},
}
DISTURBANCES: dict[str, Choice] = {
    "none": {},
    "noise": {"noise": 0.3},
    "floor": {"floor": 0.01},
    "bias": {"bias": 0.3},
    "stale": {"staleness": 1},
    "rounded": {"weights": "float8_e4m3"},
    "all": {"noise": 0.1, "floor": 0.01, "bias": 0.1, "staleness": 1, "weights": "float16"},
    "delayed": {"staleness": 1, "floor": 0.01, "side": "both"},
    "matched": {"noise": 0.3, "floor": 0.01, "bias": 0.3, "weights": "bfloat16", "side": "both"},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "estimator": tuple(ESTIMATORS),
    "clip": (None, "recompute", "bypass", "decoupled"),
    "token": ("none", *TOKEN_WEIGHTS),
    "sequence": ("none", *SEQUENCE_WEIGHTS),
    "veto": (None, 1e-4),
    "vocabulary": tuple(VOCABULARIES),
    "disturbance": tuple(DISTURBANCES),
    "minibatches": (1, 2),
    "deliberate": (False, True),
}


def every_combination() -> Iterator[Choice]:
    for values in itertools.product(*FACTORS.values()):
        yield dict(zip(FACTORS, values, strict=True))


def reasons(choice: Choice) -> list[str]:
    """The beginnings of the sentences with which a combination may be refused; none where it is sound."""
    vocabulary = VOCABULARIES[choice["vocabulary"]]
    weighted = choice["token"] != "none" or choice["sequence"] != "none"
    found = []
    if "outside" in vocabulary and (weighted or choice["veto"] or choice["clip"]):
        found.append("vocabulary.outside: paper_fill has no effect beside a correction, a veto or a clipped ratio")
    ratio = choice["token"] != "none" or choice["sequence"] in ("is", "tis", "mis")
    if choice["clip"] in ("bypass", "decoupled") and ratio:
        found.append(f"clip.ratio: {choice['clip']} already divides by the sampler's probability")
    if "side" in vocabulary and not choice["deliberate"]:
        found.append(f"vocabulary.side: {vocabulary['side']} samples from one distribution and trains another")
    if choice["minibatches"] > 1 and not (choice["clip"] or ratio or choice["deliberate"]):
        found.append("with 2 minibatches all but the first train on responses of an older policy")
    if choice["minibatches"] > 1 and choice["disturbance"] == "delayed":
        found.append("with disturbance.side: both, staleness takes one gradient a step")
    return found


def arm_of(choice: Choice) -> Choice:
    return {
        "estimator": choice["estimator"],
        "clip": choice["clip"] and {"ratio": choice["clip"]},
        "vocabulary": VOCABULARIES[choice["vocabulary"]],
        "disturbance": DISTURBANCES[choice["disturbance"]],
        "correction": {name: choice[name] for name in ("token", "sequence", "veto")},
        "deliberate": choice["deliberate"],
    }


def covering() -> list[Choice]:
    """Few admitted combinations that hold every pair of choices which any admitted combination holds, greedily."""
    admitted = [choice for choice in every_combination() if not reasons(choice)]
    places = {(name, value): i for i, (name, value) in enumerate((n, v) for n in FACTORS for v in FACTORS[n])}
    has = np.array([[places[item] for item in choice.items()] for choice in admitted])
    pairs = [has[:, i] * len(places) + has[:, j] for i, j in itertools.combinations(range(len(FACTORS)), 2)]
    pair_of = np.stack(pairs, axis=1)
    missing = np.zeros(len(places) ** 2, dtype=np.int64)
    missing[pair_of] = 1
    chosen = []
    while missing.any():
        best = int(missing[pair_of].sum(axis=1).argmax())
        chosen.append(admitted[best])
        missing[pair_of[best]] = 0
    return chosen


COVERING = covering()


def name_of(choice: Choice) -> str:
    return "-".join(str(value) for value in choice.values())


# --- what is admitted and what is not --------------------------------------------------------------------


def test_the_factors_are_those_of_the_schema() -> None:
    """A choice that is added to the schema must be added here."""
    schema = parse_study({"name": "s", "arms": {"a": {}}}).model_json_schema()["$defs"]

    def choices(block: str, key: str) -> set[str]:
        return set(schema[block]["properties"][key]["enum"])

    assert choices("Arm", "estimator") == set(FACTORS["estimator"])
    assert choices("Clip", "ratio") == set(FACTORS["clip"]) - {None}
    assert choices("Correction", "token") == set(FACTORS["token"])
    assert choices("Correction", "sequence") == set(FACTORS["sequence"])
    for key, default in (("rule", "full"), ("adapt", "none"), ("side", "both"), ("outside", "drop")):
        assert choices("Vocabulary", key) == {v.get(key, default) for v in VOCABULARIES.values()}, key
    assert set(schema["Disturbance"]["properties"]) == {key for cause in DISTURBANCES.values() for key in cause}
    assert choices("Vocabulary", "rule") == set(RULES)


def test_every_combination_is_admitted_or_refused_with_its_reason() -> None:
    """The arm alone; minibatches belong to the study and are below. Estimator and disturbance do not matter here."""
    counts = {"admitted": 0, "refused": 0}
    for choice in every_combination():
        if choice["estimator"] != "rloo" or choice["minibatches"] > 1 or choice["disturbance"] != "none":
            continue
        expected = reasons(choice)
        try:
            Arm.model_validate(arm_of(choice))
        except ValidationError as error:
            (item,) = error.errors()
            message = item["msg"].removeprefix("Value error, ")
            assert any(message.startswith(reason) for reason in expected), (choice, message)
            counts["refused"] += 1
        else:
            assert not expected, choice
            counts["admitted"] += 1
    assert sum(counts.values()) == 4 * 3 * 7 * 2 * len(VOCABULARIES) * 2
    assert min(counts.values()) > 300


@pytest.mark.parametrize("deliberate", [False, True])
@pytest.mark.parametrize("clip", FACTORS["clip"])
@pytest.mark.parametrize(("token", "sequence"), [("none", "none"), ("tis", "none"), ("none", "reject_k3")])
@pytest.mark.parametrize("vocabulary", ["full", "top_p", "sampler"])
def test_several_minibatches_are_admitted_or_refused_with_their_reason(
    clip: str | None, token: str, sequence: str, vocabulary: str, deliberate: bool
) -> None:
    choice = {
        **{name: values[0] for name, values in FACTORS.items()},
        **{"clip": clip, "token": token, "sequence": sequence, "vocabulary": vocabulary, "deliberate": deliberate},
        "minibatches": 2,
    }
    expected = reasons(choice)
    if not expected:
        assert run_of(arm_of(choice), minibatches=2).training.minibatches == 2
        return
    with pytest.raises(StudyError) as caught:
        run_of(arm_of(choice), minibatches=2)
    sentence = str(caught.value).removeprefix("the study: arms.test: ")
    assert any(sentence.startswith(reason) for reason in expected)


def test_the_subset_holds_every_pair_that_is_admitted() -> None:
    def pairs(choices: list[Choice]) -> set[tuple[Any, ...]]:
        return {pair for choice in choices for pair in itertools.combinations(choice.items(), 2)}

    admitted = pairs([choice for choice in every_combination() if not reasons(choice)])
    assert pairs(COVERING) == admitted
    # What is missing of all pairs of choices is refused, and nothing else.
    every = {((a, v), (b, w)) for a, b in itertools.combinations(FACTORS, 2) for v in FACTORS[a] for w in FACTORS[b]}
    fill = {"paper_fill", "fill_trainer"}
    for (a, v), (b, w) in every - admitted:
        one_sided = v in ("sampler", "trainer", "fill_trainer") and (b, w) == ("deliberate", False)
        delayed = (v, w) == ("delayed", 2)
        assert v in ("bypass", "decoupled") or w in fill or one_sided or delayed, ((a, v), (b, w))


# --- what is admitted trains -------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the problems; a random policy never solves one, so that half of all texts are right."""
    write_problems(problems, tmp_path / "problems.jsonl")
    monkeypatch.setattr(
        "tailrl.training.loop.score", lambda text, answer: float(zlib.crc32((text + answer).encode()) % 2)
    )
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return tmp_path


def trained(files: Path, policy: Path, arm: Choice, **training: Any) -> list[dict[str, float | None]]:
    sizes = {"steps": 2, "prompts": 2, "group_size": 3, "max_new_tokens": 5, **training}
    train(run_of(arm, **sizes), 5, policy, files / "problems.jsonl", files / "out", files)
    return [json.loads(line) for line in (files / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("plain_samplers")
@pytest.mark.parametrize("choice", COVERING, ids=name_of)
def test_what_is_admitted_trains(files: Path, policy_folder: Path, choice: Choice) -> None:
    metrics = trained(files, policy_folder, arm_of(choice), minibatches=choice["minibatches"])
    assert [line["train/step"] for line in metrics] == [0, 1]
    for line in metrics:
        assert line.keys() == METRICS.keys()
        # The only number that may not exist: a mean over outside tokens where there is none.
        missing = {"dvp/outside_delta_abs_mean"} if line["dvp/sampled_outside_train_support_count"] == 0 else set()
        values = {name: value for name, value in line.items() if name not in missing}
        assert all(value is not None and math.isfinite(value) for value in values.values()), line
    rule = VOCABULARIES[choice["vocabulary"]]
    for side, other in (("train", "sampler"), ("rollout", "trainer")):
        pruned = rule["rule"] != "full" and rule.get("side") != other
        assert (metrics[0][f"dvp/kept_vocab_per_token_{side}"] < 600) == pruned


@pytest.mark.parametrize("vocabulary", ["budget", "difficulty"])
def test_an_adapted_threshold_reaches_both_sides(
    files: Path, policy_folder: Path, plain_samplers: list[PlainSampler], vocabulary: str
) -> None:
    """It changes with the steps, and the sampler's sets stay those of the trainer."""
    metrics = trained(files, policy_folder, arm_of({**COVERING[0], "clip": None, "vocabulary": vocabulary}), steps=4)
    thresholds = [line["dvp/threshold"] for line in metrics]
    assert len(set(thresholds)) > 1
    assert len(plain_samplers) == 1
    for line in metrics:
        kept = line["dvp/kept_vocab_per_token_train"]
        assert kept == pytest.approx(line["dvp/kept_vocab_per_token_rollout"], abs=0.2)
    if vocabulary == "budget":
        # Too much is lost at first, so ρ falls by as much as one step may; then next to nothing is lost, and it rises.
        lost = [line["dvp/lost_mass_per_response"] for line in metrics]
        assert lost[0] is not None and lost[1] is not None and lost[0] > 0.05 > lost[1]
        assert thresholds[0] is not None and thresholds[1] is not None and thresholds[2] is not None
        assert thresholds[0] - 2.01 < thresholds[1] < thresholds[0] - 0.5
        assert thresholds[2] > thresholds[1]
