"""Flips and margins of the probe against a mixture in float64, computed a response at a time, with planted flips."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_fixture import mixture
from numpy.typing import NDArray
from sampler_fixture import PlainSampler
from step_fixture import make_rollouts
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tailrl.config.distributions import Distributions
from tailrl.config.load import parse_study
from tailrl.model.policy import save_policy
from tailrl.model.routing import Routing
from tailrl.probes.distributions import measure
from tailrl.probes.distributions.experts import compare_routes
from tailrl.probes.distributions.measure import kept_positions, make_requests, write_distributions
from tailrl.rollout import Decoding
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems

L, K, E = 2, 2, 8
EVERY = 2


def settings(routes: bool = True, every: int = EVERY, token_budget: int = 40) -> Distributions:
    study = {
        "name": "s",
        "arms": {"naive": {}},
        "policy": {"source": "pretrained", "path": "."},
        "training": {"max_new_tokens": 9, "token_budget": token_budget},
        "distributions": {"engines": {"one": {"sampler": {"routes": routes}}}, "responses": 12, "every": every},
    }
    return parse_study(study).compared("one")


def router_logits(model: PreTrainedModel, rollout: Rollout) -> NDArray[np.float64]:
    """Of the tokens that an engine runs, by the library's own router in float64: [P, L, E]."""
    # The library's grouped product of experts takes no float64.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = copy.deepcopy(model.config)  # into which the library writes these
    plain = AutoModelForCausalLM.from_config(config, **eager).double()
    plain.load_state_dict(model.state_dict())
    rows: list[NDArray[np.float64]] = []
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, given: rows.append((given[0].reshape(-1, gate.hidden_dim) @ gate.weight.T).numpy())
        )
    with torch.no_grad():
        plain(torch.tensor([[*rollout.prompt_tokens, *rollout.tokens][:-1]]), use_cache=False)
    return np.stack(rows, 1)


def planted(model: PreTrainedModel, rollout: Rollout, rng: np.random.Generator) -> tuple[Rollout, Any, Any]:
    """The rollout with the oracle's experts, of which some are exchanged; where that is, and the margins: [T, L]."""
    logits_PLE = router_logits(model, rollout)
    ordered_PLE = np.argsort(-logits_PLE, -1)
    sorted_PLE = np.take_along_axis(logits_PLE, ordered_PLE, -1)
    changed_PL = rng.random(logits_PLE.shape[:2]) < 0.3
    routes_PLK = ordered_PLE[..., :K].copy()
    # The best expert gives way to the worst; where nothing is planted, only the order within the set changes.
    routes_PLK[..., 0] = np.where(changed_PL, ordered_PLE[..., -1], routes_PLK[..., 0])
    own = slice(len(rollout.prompt_tokens) - 1, None)
    margin_TL = (sorted_PLE[..., K - 1] - sorted_PLE[..., K])[own]
    return replace(rollout, routes_PLK=routes_PLK[..., ::-1].astype(np.uint8)), changed_PL[own], margin_TL


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return mixture(tokenizer)


@pytest.mark.parametrize("budget", [30, 10_000])
def test_flips_are_those_that_were_planted_and_margins_the_oracle_s(model: PreTrainedModel, budget: int) -> None:
    rng = np.random.default_rng(0)
    rollouts = make_rollouts()[0]
    rollouts[1] = replace(rollouts[1], prompt_tokens=rollouts[0].prompt_tokens)
    made = [planted(model, rollout, rng) for rollout in rollouts]
    found = compare_routes(model, [one[0] for one in made], settings(token_budget=budget))
    expected_TL, margin_TL = (np.concatenate([one[part] for one in made]) for part in (1, 2))
    # Nearer than this, float32 may choose otherwise than float64.
    assert margin_TL.min() > 1e-5 and 0 < expected_TL.mean() < 1
    assert (found.expert_flip_PL == expected_TL).all()
    assert found.margin_PL.dtype == np.float32
    np.testing.assert_allclose(found.margin_PL, margin_TL, rtol=1e-3, atol=1e-5)


def test_margins_by_hand() -> None:
    routing = Routing()
    routing.logits = {0: torch.tensor([[1.0, 4.0, 3.5, -2.0]]), 1: torch.tensor([[0.0, 0.0, 0.0, 9.0]])}
    routing.chosen = {layer: routing.logits[layer].topk(2).indices for layer in (0, 1)}
    assert routing.margins().tolist() == [[2.5], [0.0]]
    routing.chosen = {layer: routing.logits[layer].topk(4).indices for layer in (0, 1)}
    assert routing.margins().tolist() == [[np.inf], [np.inf]]


def run(given: Distributions, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem],
        folder: Path) -> Any:  # fmt: skip
    save_policy(model, tokenizer, folder / "policy")
    write_problems(problems[:5], folder / "problems.jsonl")
    write_distributions(given, folder / "policy", folder / "problems.jsonl", folder / "out")
    with np.load(folder / "out/positions.npz") as file:
        return {name: file[name] for name in file}


@pytest.mark.parametrize("held", [2**26, 3 * 5 * 600], ids=["one batch", "batches"])
def test_the_job_has_them_at_the_compared_positions(
    held: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(measure, "make_sampler", lambda _, policy_folder, *__: PlainSampler(policy_folder))
    monkeypatch.setattr(measure, "HELD_LOGITS", held)
    rng, generate = np.random.default_rng(1), PlainSampler.generate
    sampled: list[tuple[Rollout, Any, Any]] = []

    def routing(self: PlainSampler, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        sampled.extend(own := [planted(model, rollout, rng) for rollout in generate(self, requests, decoding)])
        return [rollout for rollout, *_ in own]

    monkeypatch.setattr(PlainSampler, "generate", routing)
    found = run(settings(), model, tokenizer, problems, tmp_path)
    kept = [
        (changed_TL[position], margin_TL[position])
        for request, (rollout, changed_TL, margin_TL) in zip(make_requests(settings(), [(1,)]), sampled, strict=True)
        for position in kept_positions(request, rollout, EVERY)
    ]
    assert len(sampled) == 12 and found["expert_flip_PL"].shape == (len(found["tv_P"]), L)
    assert (found["expert_flip_PL"] == np.stack([flip_L for flip_L, _ in kept])).all()
    np.testing.assert_allclose(found["margin_PL"], np.stack([margin_L for _, margin_L in kept]), rtol=1e-3, atol=1e-5)


def test_responses_without_experts_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(measure, "make_sampler", lambda _, policy_folder, *__: PlainSampler(policy_folder))
    with pytest.raises(StudyError, match=r"distributions\.engines\.one: responses came without their experts"):
        run(settings(), model, tokenizer, problems, tmp_path)
    assert not (tmp_path / "out").exists()
    assert "margin_PL" not in run(settings(routes=False), model, tokenizer, problems, tmp_path)


def test_some_without_experts_or_another_policy_s_are_refused(model: PreTrainedModel) -> None:
    rollouts = make_rollouts(2)[0]
    given = planted(model, rollouts[0], np.random.default_rng(0))[0]
    with pytest.raises(StudyError, match="1 of 2 responses came without their experts"):
        compare_routes(model, [given, rollouts[1]], settings(token_budget=1000))
    assert given.routes_PLK is not None
    with pytest.raises(StudyError, match="the policy has 2 of 8 in 2"):
        compare_routes(model, [replace(given, routes_PLK=given.routes_PLK[:, :1])], settings())
