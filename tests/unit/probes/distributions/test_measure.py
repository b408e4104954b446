"""The job on a plain engine, on the exact one, and on what it cannot use."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampler_fixture import PlainSampler
from transformers import AutoModelForCausalLM

from tailrl.config.distributions import Distributions
from tailrl.config.load import parse_study
from tailrl.objective.disturbance import round_weights
from tailrl.probes.distributions import measure
from tailrl.probes.distributions.measure import write_distributions
from tailrl.rollout import Decoding
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import StudyError
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem, write_problems

V = 600
NOISE = {"noise": 0.5}
EXACT = {"engine": "exact", "dtype": "float32"}

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def problems_file(problems: list[Problem], tmp_path: Path) -> Path:
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    return tmp_path / "problems.jsonl"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the job sample with a `PlainSampler`."""
    monkeypatch.setattr(measure, "make_sampler", lambda _, policy_folder, *__: PlainSampler(policy_folder))


def settings(engine: dict[str, Any], **block: Any) -> Distributions:
    study = {
        "name": "s",
        "arms": {"naive": {}},
        "policy": {"source": "pretrained", "path": "."},
        "training": {"max_new_tokens": 9, "temperature": 0.7, "token_budget": 60},
        "distributions": {"engines": {"one": engine}, "responses": 12, "every": 2, "rho": ["e-13", 0.2], **block},
    }
    return parse_study(study).compared("one")


def measured(given: Distributions, policy_folder: Path, problems_file: Path) -> Arrays:
    out = problems_file.parent / "out"
    write_distributions(given, policy_folder, problems_file, out)
    with np.load(out / "positions.npz") as file:
        return {name: file[name] for name in file}


@pytest.mark.usefixtures("plain")
def test_a_plain_engine_agrees_with_the_trainer_at_every_place(policy_folder: Path, problems_file: Path) -> None:
    """Another place's or response's logits would lie far from the trainer's, and so would another temperature's."""
    found = measured(settings({}), policy_folder, problems_file)
    assert len(found["tv_P"]) > 30
    assert found["tv_P"].max() < 1e-5 and found["delta_max_P"].max() < 1e-4
    assert found["kept_both_PS"].tolist() == found["kept_train_PS"].tolist() == found["kept_infer_PS"].tolist()
    assert (found["kept_train_PS"][:, 0] == V).all() and (found["kept_train_PS"][:, 1] < V).any()
    record = json.loads((problems_file.parent / "out" / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["name"] == "one" and record["vocabulary"] == V
    assert abs(record["tokens"] / 2 - len(found["tv_P"])) <= 12 / 2
    assert record["versions"]["torch"]


@pytest.mark.usefixtures("plain")
def test_places_are_every_nth_from_one_by_the_responses_seed(policy_folder: Path, problems_file: Path) -> None:
    found = measured(settings({}, every=3), policy_folder, problems_file)
    seeds = [derive_seed("distributions", 0, index) for index in range(12)]
    assert (found["problem_P"] == found["response_P"] % 5).all()
    for index, seed in enumerate(seeds):
        places = found["position_P"][found["response_P"] == index]
        assert places.tolist() == list(range(seed % 3, places.max() + 1, 3)) if places.size else seed % 3 > 0
    assert set(found["position_P"].tolist()) == set(range(9)), "over the responses, every place has its turn"


@pytest.mark.usefixtures("plain")
def test_a_disturbed_engine_differs_and_its_matched_control_does_not(policy_folder: Path, problems_file: Path) -> None:
    alone = measured(settings({"disturbance": NOISE}), policy_folder, problems_file)
    both = measured(settings({"disturbance": {**NOISE, "side": "both"}}), policy_folder, problems_file)
    assert alone["tv_P"].min() > 0.1
    assert both["tv_P"].max() < 1e-5
    assert (alone["kept_both_PS"][:, 1] < alone["kept_train_PS"][:, 1]).any()


@pytest.mark.usefixtures("plain")
def test_coarse_weights_differ_and_their_matched_control_does_not(policy_folder: Path, problems_file: Path) -> None:
    coarse = {"weights": "float8_e4m3"}
    alone = measured(settings({"disturbance": coarse}), policy_folder, problems_file)
    both = measured(settings({"disturbance": {**coarse, "side": "both"}}), policy_folder, problems_file)
    assert alone["tv_P"].min() > 1e-4
    assert both["tv_P"].max() < 1e-5


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("disturbance", [{}, {"weights": "float8_e4m3", "side": "both"}])
def test_the_trainer_computes_in_trainings_number_format(
    disturbance: dict[str, Any], policy_folder: Path, problems_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets float32 weights. The trainer's logits are those of the library's own model in bfloat16. A matched
    control rounds the float32 weights, not those in bfloat16."""
    handed: set[torch.dtype] = set()
    load, seen = PlainSampler.load_weights, []

    def spy(self: PlainSampler, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept = dict(weights)
        handed.update(weight.dtype for weight in kept.values())
        load(self, kept.items())

    both = measure.both_logits
    monkeypatch.setattr(PlainSampler, "load_weights", spy)
    monkeypatch.setattr(measure, "both_logits", lambda *a: (seen.append((a, found := both(*a))), found)[1])
    usual = measured(settings({"disturbance": disturbance}), policy_folder, problems_file)
    half = settings({"disturbance": disturbance}).model_copy(update={"dtype": "bfloat16"})
    apart = measured(half, policy_folder, problems_file)
    assert handed == {torch.float32} and usual["tv_P"].max() < 1e-5 < apart["tv_P"].mean() < 0.05
    (model, requests, rollouts, _), (trainer_PV, _) = seen[-1]
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    logits_PV = 0.7 * trainer_PV
    assert ((logits_PV.bfloat16() - logits_PV).abs() > 1e-5).float().mean() > 0.5, "the head's product is not rounded"
    library = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    rounded = dict(round_weights(library.state_dict().items(), disturbance.get("weights")))
    library.load_state_dict({name: weight.to(torch.bfloat16).float() for name, weight in rounded.items()})
    for parameter in library.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    row = 0
    for request, rollout in zip(requests, rollouts, strict=True):
        whole = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
        with torch.no_grad():
            own_TV = library(input_ids=whole).logits[0, len(rollout.prompt_tokens) - 1 :]
        for position in measure.kept_positions(request, rollout, half.every):
            torch.testing.assert_close(trainer_PV[row], own_TV[position].float() / 0.7, atol=0.03, rtol=0.03)
            row += 1
    assert row == len(trainer_PV)


@pytest.mark.parametrize(
    ("dtype", "engine", "expected"),
    [
        ("auto", {}, ["float32", "bfloat16"]),
        ("float32", {}, ["float32", "float32"]),
        ("bfloat16", {}, ["bfloat16", "bfloat16"]),
        ("bfloat16", EXACT, ["float32", "float32"]),
        ("auto", EXACT, ["float32", "float32"]),
    ],
)
def test_auto_is_bfloat16_on_a_gpu_alone(dtype: str, engine: dict[str, str], expected: list[str]) -> None:
    given = settings({"sampler": engine}).model_copy(update={"dtype": dtype})
    assert [given.decided(gpu).dtype for gpu in (False, True)] == expected


@pytest.mark.usefixtures("plain")
def test_the_noise_floor_asks_nothing_of_the_engine(
    policy_folder: Path, problems_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is about the same responses as the engine's own comparison."""
    usual = measured(settings({}), policy_folder, problems_file)
    asked: list[int] = []
    generate = PlainSampler.generate

    def spy(self: PlainSampler, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        asked.append(decoding.keep_every)
        return generate(self, requests, decoding)

    budgets: list[int] = []
    score = measure.trainer_logits
    monkeypatch.setattr(PlainSampler, "generate", spy)
    monkeypatch.setattr(measure, "trainer_logits", lambda *a: (budgets.append(a[-1]), score(*a))[1])
    floor = measured(settings({"rescored": 1}), policy_folder, problems_file)
    assert asked == [0] and budgets == [60, 1]
    assert floor["token_P"].tolist() == usual["token_P"].tolist()
    assert floor["tv_P"].max() < 1e-5


@pytest.mark.usefixtures("plain")
def test_few_logits_are_held_and_compared_at_once(
    policy_folder: Path, problems_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(settings({}), policy_folder, problems_file)
    monkeypatch.setattr(measure, "HELD_LOGITS", 5 * 5 * V)
    monkeypatch.setattr(measure, "COMPARED_LOGITS", 3 * V)
    sizes: list[int] = []
    part = measure.compare_rollouts
    monkeypatch.setattr(measure, "compare_rollouts", lambda *a: (sizes.append(len(a[1])), part(*a))[1])
    parts = measured(settings({}), policy_folder, problems_file)
    assert sizes == [5, 5, 2]
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "engine",
    [
        {"sampler": EXACT},
        {"sampler": EXACT, "rescored": 1},
        {"sampler": EXACT, "disturbance": {"noise": 0.3, "floor": 1e-3, "side": "both"}},
    ],
    ids=["engine", "rescored", "matched control"],
)
def test_the_exact_engine_differs_nowhere(engine: dict[str, Any], policy_folder: Path, problems_file: Path) -> None:
    found = measured(settings(engine, responses=40, every=1), policy_folder, problems_file)
    assert len(found["tv_P"]) > 200
    for name in ("tv_P", "delta_max_P", "half_range_P", "kl_train_infer_P", "kl_infer_train_P", "flip_P", "k3_PS"):
        assert not found[name].any(), name
    assert (found["kept_both_PS"] == found["kept_train_PS"]).all()


# --- what cannot be used -----------------------------------------------------------------------------


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rho": ["e-13", "900/V"]}, "distributions.rho: one of e-13, 900/V is above 1 for 600 tokens"),
        ({"responses": 1, "every": 1000}, "distributions: none of 1 responses has a position"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    block: dict[str, Any], words: str, policy_folder: Path, problems_file: Path
) -> None:
    with pytest.raises(StudyError, match=words):
        measured(settings({}, **block), policy_folder, problems_file)
    assert not (problems_file.parent / "out").exists()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("factor", "words"), [(0.0, "the engine vllm does not keep the logits"), (np.nan, "logits are not finite")]
)
def test_an_engine_that_gives_no_logits_is_refused(
    factor: float, words: str, policy_folder: Path, problems_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = PlainSampler.generate

    def other(self: PlainSampler, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        kept = [(r, r.logits_sampler_KV if factor else ()) for r in generate(self, requests, decoding)]
        return [replace(r, logits_sampler_KV=tuple(logits_V * factor for logits_V in own)) for r, own in kept]

    monkeypatch.setattr(PlainSampler, "generate", other)
    with pytest.raises(StudyError, match=words):
        measured(settings({}), policy_folder, problems_file)


def test_a_temperature_that_the_engine_refuses_ends_before_the_engine_starts(
    policy_folder: Path, problems_file: Path
) -> None:
    given = settings({}).model_copy(update={"temperature": 3.0})
    with pytest.raises(StudyError, match=r"distributions\.engines\.one: training\.temperature: 3 is above 2"):
        measured(given, policy_folder, problems_file)
