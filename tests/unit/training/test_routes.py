"""Routing replay in the trainer: its experts are the sampler's at every token, and its gradient is the oracle's."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_fixture import FixedBlock, mixture
from ranks_fixture import on_ranks
from step_fixture import make_rollouts, run_of, samples_of
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tailrl.config.jobs import Run
from tailrl.objective.diagnostics import routing_metrics
from tailrl.rollout.types import Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.tracking.metrics import ROUTING
from tailrl.training.placement import place
from tailrl.training.routes import as_bits, packed
from tailrl.training.samples import Sample, in_micro_batches
from tailrl.training.scorer import make_scorer, score_all
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

L, K, E = 2, 2, 8
DEVICE = torch.device("cpu")


def routed_rollouts(count: int = 6, seed: int = 0) -> list[Rollout]:
    """Random experts; the first three share a prompt, two of them its experts, and the third differs in one token."""
    rng = np.random.default_rng(seed)
    rollouts = make_rollouts(count)[0]
    prompt = (5, 6, 7, 8)
    rollouts[:3] = [replace(rollout, prompt_tokens=prompt) for rollout in rollouts[:3]]
    made = []
    for rollout in rollouts:
        tokens = len(rollout.prompt_tokens) + len(rollout.tokens) - 1
        routes = rng.random((tokens, L, E)).argpartition(K, -1)[..., :K].astype(np.uint8)
        made.append(replace(rollout, routes_PLK=routes))
    first = made[0].routes_PLK
    assert first is not None
    for rollout in made[1:3]:
        assert rollout.routes_PLK is not None
        rollout.routes_PLK[:4] = first[:4]
    last = made[2].routes_PLK
    assert last is not None
    last[2, 1] = (last[2, 1] + 1) % E
    return made


def replaying(replay: bool = True, **training: Any) -> Run:
    run = run_of({}, **training)
    return run.model_copy(update={"training": run.training.model_copy(update={"routing_replay": replay})})


def samples(run: Run) -> list[Sample]:
    rollouts = routed_rollouts()
    return samples_of(rollouts, np.random.default_rng(4).normal(size=len(rollouts)).tolist(), run)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return mixture(tokenizer)


def watch_experts(model: PreTrainedModel) -> dict[int, list[torch.Tensor]]:
    """The experts that each layer is asked for, in each forward."""
    asked: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(L)}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, given, number=number: asked[number].append(given[1].clone())
        )
    return asked


def test_the_row_has_each_token_s_experts() -> None:
    rollouts = routed_rollouts()
    batch, given_LPK = packed(rollouts, DEVICE)
    assert given_LPK is not None
    for n, rollout in enumerate(rollouts):
        assert rollout.routes_PLK is not None
        row = batch.packing.index_NL[n, : len(rollout.routes_PLK)]
        assert batch.tokens_P[row].tolist() == [*rollout.prompt_tokens, *rollout.tokens[:-1]]
        assert (given_LPK[:, row].permute(1, 0, 2).numpy() == rollout.routes_PLK).all()
    # Two responses share the prompt's four tokens, the third has its own copy.
    alone = sum(len(r.prompt_tokens) + len(r.tokens) - 1 for r in rollouts)
    assert len(batch.tokens_P) == alone - 4


def test_micro_batches_count_a_prompt_that_routes_split_as_often_as_it_is_in_the_row() -> None:
    run = replaying()
    given = samples(run)
    whole = len(packed([sample.rollout for sample in given], DEVICE)[0].tokens_P)
    for budget in range(8, whole + 2):
        run = replaying(token_budget=budget)
        for group in in_micro_batches(given, range(len(given)), run.training.token_budget):
            row = packed([given[i].rollout for i in group], DEVICE)[0].tokens_P
            assert len(group) == 1 or len(row) <= budget


@pytest.mark.parametrize("recompute", [False, True])
def test_the_trainer_s_experts_are_the_sampler_s_at_every_token(model: PreTrainedModel, recompute: bool) -> None:
    """In every forward: also those of earlier minibatches' log-probs, and of layers computed again."""
    run = replaying(activation_checkpointing=recompute)
    asked, given = watch_experts(model), samples(run)
    if recompute:
        place(model, run.training)
    scored = make_scorer(run)(model, given)
    logprobs, flips_TL = scored.logprobs, scored.flips_TL
    logprobs.logp_T.sum().backward()
    score_all(model, given[:1], make_scorer(run))
    _, given_LPK = packed([sample.rollout for sample in given], DEVICE)
    _, first_LPK = packed([given[0].rollout], DEVICE)
    assert given_LPK is not None and first_LPK is not None and flips_TL is not None
    for layer in range(L):
        *whole, last = asked[layer]
        assert len(whole) == 1 + recompute
        assert all(torch.equal(chosen, given_LPK[layer]) for chosen in whole)
        assert torch.equal(last, first_LPK[layer])
    assert flips_TL.shape == (len(logprobs.logp_T), L) and 0 < flips_TL.double().mean() <= 1


def test_without_replay_the_trainer_chooses_and_flips_are_counted(model: PreTrainedModel) -> None:
    run = replaying(replay=False)
    asked, given = watch_experts(model), samples(run)
    scored = make_scorer(run)(model, given)
    flips_TL, batch = scored.flips_TL, scored.batch
    _, given_LPK = packed([sample.rollout for sample in given], DEVICE)
    assert given_LPK is not None and flips_TL is not None
    for layer in range(L):
        own_PK = asked[layer][0]
        expected = [
            set(own_PK[row].tolist()) != set(given_LPK[layer, row].tolist()) for row in batch.predict_T.tolist()
        ]
        assert flips_TL[:, layer].tolist() == expected


def test_a_sampler_with_the_trainer_s_experts_shows_no_flip(model: PreTrainedModel) -> None:
    """Replaying the trainer's own choice changes no bit."""
    run = replaying()
    plain = [replace(sample, rollout=replace(sample.rollout, routes_PLK=None)) for sample in samples(run)]
    for sample in plain:
        asked = watch_experts(model)
        scored = make_scorer(run_of({}))(model, [sample])
        routes = torch.stack([asked[layer][0] for layer in range(L)], 1).numpy().astype(np.uint8)
        with_routes = replace(sample, rollout=replace(sample.rollout, routes_PLK=routes[:, :, ::-1].copy()))
        again = make_scorer(run)(model, [with_routes])
        assert again.flips_TL is not None and not again.flips_TL.any()
        torch.testing.assert_close(again.logprobs.logp_T, scored.logprobs.logp_T, rtol=0, atol=1e-5)


def oracle_gradient(model: PreTrainedModel, given: Sequence[Sample], temperature: float) -> dict[str, torch.Tensor]:
    """float64, a response at a time through a plain model with fixed experts: −mean_n A_n Σ_t log π(y_t)."""
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").double()
    plain.load_state_dict(model.state_dict())
    blocks = [layer.mlp for layer in plain.model.layers]
    loss = torch.zeros((), dtype=torch.float64)
    for sample in given:
        rollout = sample.rollout
        assert rollout.routes_PLK is not None
        for layer, block in enumerate(blocks):
            routes_PK = torch.from_numpy(rollout.routes_PLK[:, layer].astype(np.int64))
            plain.model.layers[layer].mlp = FixedBlock(block, routes_PK, 0)
        tokens = [*rollout.prompt_tokens, *rollout.tokens]
        logits_PV = plain(torch.tensor([tokens[:-1]]), use_cache=False).logits[0] / temperature
        logp_TV = logits_PV[len(rollout.prompt_tokens) - 1 :].log_softmax(-1)
        logp = logp_TV[torch.arange(len(rollout.tokens)), list(rollout.tokens)].sum()
        loss = loss - sample.advantage * logp / len(given)
    for layer, block in enumerate(blocks):
        plain.model.layers[layer].mlp = block
    loss.backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [40, 10_000])
def test_the_gradient_is_that_of_a_float64_oracle_with_fixed_experts(model: PreTrainedModel, budget: int) -> None:
    run = replaying(token_budget=budget, max_grad_norm=1e9)
    given, found = samples(run), {}

    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ARG002
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    update(model, Keeping(model.parameters(), lr=1.0), given, run, 0, Stopwatch())
    expected = oracle_gradient(model, given, run.training.temperature)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        size = gradient.abs().max().item()
        assert size > 0
        torch.testing.assert_close(found[name].double(), gradient, rtol=1e-3, atol=1e-4 * size, msg=name)
    wrong = [replace(s, rollout=replace(s.rollout, routes_PLK=(s.rollout.routes_PLK + 1) % E)) for s in given]
    other = oracle_gradient(model, wrong, run.training.temperature)
    assert any((found[name] - other[name]).abs().max() > 0.1 * other[name].abs().max() for name in other)


def gradients_of(model: PreTrainedModel, run: Run) -> dict[str, torch.Tensor]:
    """Of one update, whole on every rank, where the run places the model; and the log-ratios' metrics."""
    place(model, run.training)
    found: dict[str, torch.Tensor] = {}

    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ARG002
            found.update(
                {n: distributed.whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
            )

    _, _, record = update(model, Keeping(model.parameters(), lr=1.0), samples(run), run, 0, Stopwatch())
    return found | {"flips": record.flips_TL.sum(0), "order": record.number_N}


def test_two_ranks_replay_as_one_process(model: PreTrainedModel, tmp_path: Path) -> None:
    run = replaying(token_budget=40, max_grad_norm=1e9)
    both = on_ranks(2, tmp_path, gradients_of, model, run)
    alone = gradients_of(model, run)
    for found in both:
        assert found.keys() == alone.keys()
        assert torch.equal(found["flips"], alone["flips"]) and torch.equal(found["order"], alone["order"])
        for name, gradient in alone.items():
            size = gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * size, msg=name)


def test_a_trainer_in_bfloat16_replays_too(model: PreTrainedModel, tmp_path: Path) -> None:
    """In half precision the routers' own choices differ in places; what is replayed does not."""
    exact = gradients_of(copy.deepcopy(model), replaying(max_grad_norm=1e9))
    (half,) = on_ranks(1, tmp_path, gradients_of, model, replaying(max_grad_norm=1e9, dtype="bfloat16"))
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj"):
        cosine = torch.nn.functional.cosine_similarity(half[name].flatten(), exact[name].flatten(), 0)
        assert cosine > 0.99


# --- refusals ------------------------------------------------------------------------------------------


def test_a_replay_without_routes_is_refused(model: PreTrainedModel) -> None:
    run = replaying()
    without = [replace(sample, rollout=replace(sample.rollout, routes_PLK=None)) for sample in samples(run)]
    with pytest.raises(StudyError, match=r"routing_replay needs the sampler's experts, which it did not give"):
        make_scorer(run)(model, without)
    with pytest.raises(StudyError, match="1 of 6 responses came without their experts"):
        make_scorer(run)(model, [without[0], *samples(run)[1:]])


def test_experts_of_another_policy_are_refused(model: PreTrainedModel, policy_folder: Any) -> None:
    run = replaying()
    given = samples(run)
    far = [replace(s, rollout=replace(s.rollout, routes_PLK=s.rollout.routes_PLK + 8)) for s in given]
    with pytest.raises(StudyError, match=r"2 experts a token in 2 layers, up to number 15; .* has 2 of 8 in 2"):
        make_scorer(run)(model, far)
    dense = AutoModelForCausalLM.from_pretrained(policy_folder)
    with pytest.raises(StudyError, match="the policy is no mixture of experts"):
        make_scorer(run)(dense, given)


# --- metrics -------------------------------------------------------------------------------------------


def test_metrics_are_as_they_are_described() -> None:
    rng = np.random.default_rng(0)
    flips, ratio = rng.random((50, 3)) < [0.1, 0.3, 0.2], 0.3 * rng.standard_normal(50)
    found = routing_metrics(torch.from_numpy(flips), torch.from_numpy(ratio))
    any_layer = [bool(row.any()) for row in flips]
    k3 = [float(np.exp(value) - value - 1) for value in ratio]
    flipped = [value for value, flip in zip(k3, any_layer, strict=True) if flip]
    kept = [value for value, flip in zip(k3, any_layer, strict=True) if not flip]
    layers = [sum(flips[:, layer]) / 50 for layer in range(3)]
    expected = {
        "routing/flip_fraction": sum(any_layer) / 50,
        "routing/layer_flip_fraction_mean": sum(layers) / 3,
        "routing/layer_flip_fraction_first": layers[0],
        "routing/layer_flip_fraction_last": layers[2],
        "routing/layer_flip_fraction_max": max(layers),
        "routing/flipped_k3_kl": sum(flipped) / len(flipped),
        "routing/unflipped_k3_kl": sum(kept) / len(kept),
        "routing/flipped_k3_share": sum(flipped) / sum(k3),
    }
    assert found == pytest.approx(expected, rel=1e-9)
    assert found.keys() == ROUTING.keys()
    bits = as_bits(torch.from_numpy(flips)).tolist()
    assert [[bool(number >> layer & 1) for layer in range(3)] for number in bits] == flips.tolist()


def test_no_flip_leaves_its_k3_open() -> None:
    found = routing_metrics(torch.zeros(4, 2, dtype=torch.bool), torch.full((4,), 0.1))
    assert np.isnan(found["routing/flipped_k3_kl"])
    assert found["routing/flip_fraction"] == found["routing/flipped_k3_share"] == 0
