"""Every estimator × clip × correction × vocabulary × disturbance: an arm is admitted and trains, or refused with why.

A covering subset of the admitted arms goes through the whole training loop. Every pair of choices that any admitted arm
combines, such as (grpo, decoupled) or (top_p, reject_k3), is in an arm that trains two steps. Those that have every
choice once are tried at every change, the others with the slow tests. Remedies of the catalogue whose settings none of
these holds together train as they stand there. `test_full_product` takes the estimators, corrections and vocabularies
of all arms through the update alone. Other tests hold each choice to its definition.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from arms_fixture import DISTURBANCES, EXTRAS, FACTORS, VOCABULARIES, Choice, arm_of, every_combination, reasons
from cases_fixture import rest_long
from sampler_fixture import PlainSampler
from step_fixture import run_of

from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.tokens import read_tokens
from tailrl.config.arm import Arm, Clip
from tailrl.config.base import IMPORTED
from tailrl.config.load import parse_study
from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.ratio_losses import RATIO_LOSSES
from tailrl.objective.safe_set import RULES
from tailrl.runtime.errors import StudyError
from tailrl.tracking.metrics import GRADIENT_NORM, METRICS
from tailrl.training.loop import train


def covering(**factors: tuple[Any, ...]) -> list[Choice]:
    """Few admitted combinations that hold every pair of choices which any admitted combination holds, greedily."""
    values = FACTORS | factors
    # No reason reads the estimator, the first factor: one stands for all, which saves seconds of every start.
    one = every_combination(**values | {"estimator": values["estimator"][:1]})
    sound = [choice for choice in one if not reasons(choice)]
    admitted = [choice | {"estimator": name} for name in values["estimator"] for choice in sound]
    places = {(name, value): i for i, (name, value) in enumerate((n, v) for n in values for v in values[n])}
    has = np.tile([[places[item] for item in choice.items()] for choice in sound], (len(values["estimator"]), 1))
    has[:, 0] = np.repeat([places["estimator", name] for name in values["estimator"]], len(sound))
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
LATER = covering(
    extra=tuple(EXTRAS),
    reference=(None, "loss k2", "loss k3", "reward k1"),
    clip=(None, "recompute", "decoupled gspo", *(f"bypass {loss}" for loss in RATIO_LOSSES)),
    token=("none",),
    sequence=("none",),
    vocabulary=("full", "min_p", "top_p", "replay"),
    disturbance=("none", "all"),
    deliberate=(True,),
)
"""Those of the corrections in EXTRAS, of the ratio's losses and of a reference policy, which have fewer partners."""


def each_once(choices: list[Choice]) -> list[Choice]:
    """Few of them that hold every choice which any of them holds, greedily."""
    missing = {item for choice in choices for item in choice.items()}
    chosen = []
    while missing:
        chosen.append(max(choices, key=lambda choice: len(missing & choice.items())))
        missing -= chosen[-1].items()
    return chosen


def name_of(choice: Choice) -> str:
    return "-".join(str(value) for value in choice.values())


ROOT = Path(__file__).parents[3]
CATALOGUE: list[Choice] = yaml.safe_load((ROOT / "benchmarks" / "remedies.yaml").read_text(encoding="utf-8"))


def settings_of(arm: Choice) -> frozenset[Any]:
    """The settings of an arm other than defaults, presets expanded: names and flags themselves, of numbers the key."""

    def flat(block: Any, path: str) -> set[Any]:
        if isinstance(block, dict):
            return {item for key, value in block.items() for item in flat(value, f"{path}.{key}")}
        if isinstance(block, list | tuple):
            return {(path, frozenset(flat(rule, ""))) for rule in block}
        number = path.endswith((".rho", ".rho_easy")) or (isinstance(block, int | float) and block is not True)
        return {path if number else (path, block)}

    return frozenset(flat(Arm.model_validate(arm).model_dump(exclude_defaults=True), ""))


def not_held(choices: list[Choice]) -> list[Choice]:
    """The catalogue's entries whose settings no single arm of these has."""
    every = [settings_of(arm_of(choice)) for choice in choices]
    return [entry for entry in CATALOGUE if not any(settings_of(entry["arm"]) <= held for held in every)]


# --- what is admitted and what is not --------------------------------------------------------------------


def test_the_factors_are_those_of_the_schema() -> None:
    """A choice that is added to the schema must be added here."""
    schema = parse_study({"name": "s", "arms": {"a": {}}}).model_json_schema()["$defs"]

    def choices(block: str, key: str) -> set[str]:
        field = schema[block]["properties"][key]
        return set(field.get("enum") or field["anyOf"][0]["enum"])  # beside an import path

    assert choices("Arm", "estimator") == set(FACTORS["estimator"])
    assert Clip.kinds().keys() - {IMPORTED} == set(RATIO_LOSSES)
    assert choices("Ppo", "ratio") == set(FACTORS["clip"]) - {None}
    assert choices("Correction", "token") == set(FACTORS["token"])
    assert choices("Correction", "sequence") == set(FACTORS["sequence"])
    for key, default in (("adapt", "none"), ("side", "both"), ("outside", "drop")):
        assert choices("MinP", key) == {v.get(key, default) for v in VOCABULARIES.values()}, key
    assert set(schema["Disturbance"]["properties"]) == {key for cause in DISTURBANCES.values() for key in cause}
    assert Vocabulary.kinds().keys() == set(RULES) == {v.get("rule", "full") for v in VOCABULARIES.values()}


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


@pytest.mark.slow
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
        matched = v == "replay" and w in ("delayed", "matched")
        twice = (a, b) == ("token", "sequence")
        assert v in ("bypass", "decoupled") or w in fill or one_sided or delayed or twice or matched, ((a, v), (b, w))


# --- what is admitted trains -------------------------------------------------------------------------------


def trained(files: Path, policy: Path, arm: Choice, **training: Any) -> list[dict[str, float | None]]:
    sizes = {"steps": 2, "prompts": 2, "group_size": 3, "max_new_tokens": 5, **training}
    run = run_of(arm, **sizes)
    train(run, 5, policy, files / "problems.jsonl", files / "out", files)
    read_tokens(files / "out", read_metrics(files / "out"), run.training.keep_tokens_every)  # they are the metrics' own
    return [json.loads(line) for line in (files / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("plain_samplers")
@pytest.mark.parametrize("choice", rest_long(each_once(COVERING + LATER), COVERING + LATER, name_of))
def test_every_admitted_combination_trains(files: Path, policy_folder: Path, choice: Choice) -> None:
    metrics = trained(files, policy_folder, arm_of(choice), minibatches=choice["minibatches"])
    assert [line["train/step"] for line in metrics] == [0, 1]
    for line in metrics:
        assert line.keys() == METRICS.keys()
        # Two means may not exist: over outside tokens, without any; and over responses without an outside token, where
        # each of the step's six can have one.
        outside = line["dvp/sampled_outside_train_support_count"]
        assert outside is not None
        missing = {"dvp/outside_delta_abs_mean"} if outside == 0 else set()
        if choice["reference"] is None:
            missing |= {"policy/reference_k1", "policy/reference_k3"}
        if outside >= 6:
            missing |= {"rollout_corr/delta_seq_abs_mean"}
        values = {name: value for name, value in line.items() if name not in missing}
        assert all(value is not None and math.isfinite(value) for value in values.values()), line
    rule = VOCABULARIES[choice["vocabulary"]]
    for side, other in (("train", "sampler"), ("rollout", "trainer")):
        pruned = rule["rule"] != "full" and rule.get("side") != other
        assert (metrics[0][f"dvp/kept_vocab_per_token_{side}"] < 600) == pruned


@pytest.mark.usefixtures("plain_samplers")
@pytest.mark.parametrize("entry", rest_long(not_held(each_once(COVERING + LATER)), CATALOGUE, lambda own: own["name"]))
def test_every_remedy_of_the_catalogue_trains(files: Path, policy_folder: Path, entry: Choice) -> None:
    """At every change it does so in an arm above that has all its settings, or else here."""
    metrics = trained(files, policy_folder, entry["arm"])
    assert [line["train/step"] for line in metrics] == [0, 1]
    # What drops nothing has no metric of its own.
    name = entry.get("metric", GRADIENT_NORM)
    for line in metrics:
        value = line[name]
        assert value is not None and math.isfinite(value), name


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
        # At first too much is lost, so ρ falls as far as one step may; then almost nothing is lost, and ρ rises.
        lost = [line["dvp/lost_mass_per_response"] for line in metrics]
        assert lost[0] is not None and lost[1] is not None and lost[0] > 0.05 > lost[1]
        assert thresholds[0] is not None and thresholds[1] is not None and thresholds[2] is not None
        assert thresholds[0] - 2.01 < thresholds[1] < thresholds[0] - 0.5
        assert thresholds[2] > thresholds[1]
