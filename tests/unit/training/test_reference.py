"""The base policy as reference of a step: gradients with a KL against a float64 policy and loops over its tokens."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from step_fixture import make_rollouts, run_of, samples_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrl.model.policy import named_weights
from tailrl.model.quantized import match_engine
from tailrl.tracking import metrics as keys
from tailrl.training.reference import reference_weights, with_reference
from tailrl.training.scorer import computing_at, make_scorer, score_all
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch

BETA, COUNT = 0.3, 6


def perturbed(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def plain(folder: Path, model: PreTrainedModel | None = None) -> PreTrainedModel:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    if model is not None:
        found.load_state_dict(dict(named_weights(model)))
    return found


@pytest.mark.parametrize(("where", "estimator"), [("loss", "k2"), ("loss", "k3"), ("reward", "k1")])
def test_a_step_with_a_reference_is_the_definition(
    model: PreTrainedModel, policy_folder: Path, where: str, estimator: str
) -> None:
    """Also a response without advantage is pulled to the base where the KL is in the loss."""
    penalty = {"coefficient": BETA, "estimator": estimator, "where": where}
    run = run_of({"reference_kl": penalty}, prompts=3, group_size=2)
    perturbed(model)
    rollouts, _ = make_rollouts(COUNT)
    rewards_PG = np.array([[1, 0], [0, 0], [0, 1]], np.float32)
    advantages = (rewards_PG - rewards_PG[:, ::-1]).flatten().tolist()
    chosen = samples_of(rollouts, advantages, run)
    before = {name: weight.clone() for name, weight in named_weights(model)}
    reference = reference_weights(run, policy_folder)
    chosen = list(with_reference(model, chosen, rewards_PG, run, reference, Stopwatch()))
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(model))
    loss, record = accumulate_gradients(model, chosen, make_scorer(run), Stopwatch())

    new, base = plain(policy_folder, model), plain(policy_folder)
    logps, terms, k1, k3 = [], [], [], []
    for rollout in rollouts:
        row, start = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]]), len(rollout.prompt_tokens) - 1
        at = torch.arange(len(rollout.tokens)), torch.tensor(rollout.tokens)
        own_T, ref_T = (
            (m(row).logits[0, start:-1] / run.training.temperature).log_softmax(-1)[at] for m in (new, base)
        )
        log_r_T = ref_T.detach() - own_T
        k1 += (-log_r_T).tolist()
        k3 += [math.exp(x) - 1 - x for x in log_r_T.tolist()]
        logps.append(own_T)
        terms.append({"k1": -log_r_T, "k2": log_r_T**2 / 2, "k3": log_r_T.exp() - 1 - log_r_T}[estimator].sum())
    if where == "reward":
        shaped = [reward - BETA * term.item() for reward, term in zip(rewards_PG.ravel(), terms, strict=True)]
        advantages = [shaped[i] - shaped[i ^ 1] for i in range(COUNT)]
    expected = torch.stack([-a * logp_T.sum() for a, logp_T in zip(advantages, logps, strict=True)]).sum() / COUNT
    if where == "loss":
        expected = expected + BETA * torch.stack(terms).sum() / COUNT
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    wanted = {name: parameter.grad for name, parameter in new.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = wanted[name].abs().max().item()
        torch.testing.assert_close(parameter.grad.double(), wanted[name], rtol=0, atol=1e-4 * scale + 1e-7, msg=name)
    found = record.metrics()
    assert found[keys.REFERENCE_K1] == pytest.approx(np.mean(k1), abs=1e-5)
    assert found[keys.REFERENCE_K3] == pytest.approx(np.mean(k3), abs=1e-5)


def test_without_a_reference_nothing_is_read_or_changed(model: PreTrainedModel, tmp_path: Path) -> None:
    run = run_of({})
    assert reference_weights(run, tmp_path / "nowhere") == ()
    chosen: list[Any] = samples_of(*make_rollouts(), run)
    assert with_reference(model, chosen, np.zeros((2, 4), np.float32), run, (), Stopwatch()) is chosen


@pytest.mark.parametrize(
    "arm",
    [
        {"disturbance": {"weights": "float8_e4m3", "side": "both"}, "sampler": {"engine": "exact", "dtype": "float32"}},
        {"sampler": {"engine": "exact", "dtype": "float32", "quantization": "int8", "kv_cache_dtype": "fp8_e4m3"}},
    ],
    ids=["coarse weights on both sides", "quantised twin"],
)
def test_the_reference_is_rounded_as_the_policy_is(
    model: PreTrainedModel, policy_folder: Path, arm: dict[str, Any]
) -> None:
    """The untrained policy is its own reference, to the bit, and with unrounded weights it would not be."""
    penalty = {"coefficient": BETA, "estimator": "k3", "where": "loss"}
    run = run_of({"reference_kl": penalty} | arm, prompts=3, group_size=2)
    match_engine(model, run.sampler)
    rollouts, _ = make_rollouts(COUNT)
    chosen: list[Any] = samples_of(rollouts, [1.0] * COUNT, run)
    reference = reference_weights(run, policy_folder)
    found = with_reference(model, chosen, np.zeros((3, 2), np.float32), run, reference, Stopwatch())
    with torch.no_grad(), computing_at(model, run, None):
        own = score_all(model, chosen, make_scorer(run))
    with torch.no_grad():
        unrounded = score_all(model, chosen, make_scorer(run))
    assert all(torch.equal(a.logp_reference_T, b.logp_full_T) for a, b in zip(found, own, strict=True))
    assert not all(torch.equal(a.logp_reference_T, b.logp_full_T) for a, b in zip(found, unrounded, strict=True))
