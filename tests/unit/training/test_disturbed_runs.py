"""Whole runs under the mismatch dial: which weights the engine gets when, and the matched control.

The engine is the trainer's own model, so that what the two differ by is the disturbance alone.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from definitions import disturbed, safe_tokens
from sampler_fixture import PlainSampler
from step_fixture import DVP, RHO, make_rollouts, run_of, samples_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.tokens import read_tokens
from tailrl.config.sampler import Disturbance
from tailrl.model.policy import load_policy, named_weights
from tailrl.objective.disturbance import round_weights
from tailrl.objective.noise import normal
from tailrl.training.loop import train
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch
from tailrl.training.weight_sync import WeightSync

STEPS = 4
CAUSES: dict[str, dict[str, Any]] = {
    "noise": {"noise": 0.3},
    "bias": {"bias": 0.3},
    "floor": {"floor": 0.05},
    "weights": {"weights": "float8_e4m3"},
    "all": {"noise": 0.2, "bias": 0.2, "floor": 0.01, "weights": "float8_e4m3"},
}


def trained(files: Path, policy: Path, arm: dict[str, Any], **training: Any) -> list[dict[str, float]]:
    sizes = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 0, **training}
    # The results of an equal run would be given again.
    shutil.rmtree(files / "checkpoints", ignore_errors=True)
    run = run_of({"sampler": {"dtype": "float32"}, **arm}, **sizes)
    train(run, 5, policy, files / "problems.jsonl", files, files)
    read_tokens(files, read_metrics(files), run.training.keep_tokens_every)  # they are the metrics' own
    return [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]


# --- the weights that the engine gets ----------------------------------------------------------------------


def test_an_engine_with_weights_of_two_steps_ago(
    files: Path, policy_folder: Path, plain_samplers: list[PlainSampler]
) -> None:
    """Step n samples with the weights of step max(0, n − 2), to the bit."""
    for staleness in (0, 2):
        trained(files, policy_folder, {"disturbance": {"staleness": staleness}})
    fresh, stale = (sampler.handed for sampler in plain_samplers)
    assert len(fresh) == len(stale) == STEPS + 1
    first = dict(named_weights(load_policy(policy_folder)))
    for handed in stale[:3]:
        assert all(torch.equal(handed[name], first[name]) for name in first)
    assert torch.equal(fresh[0]["lm_head.weight"], first["lm_head.weight"])
    assert not torch.equal(stale[3]["lm_head.weight"], first["lm_head.weight"])
    # The first update is on the same responses in both runs; the stale engine gets its weights two steps later.
    assert all(torch.equal(stale[3][name], fresh[1][name]) for name in first)


def test_staleness_shows_as_mismatch(files: Path, policy_folder: Path, plain_samplers: list[PlainSampler]) -> None:
    fresh, stale = (trained(files, policy_folder, {"disturbance": {"staleness": k}}) for k in (0, 2))
    assert len(plain_samplers) == 2
    assert max(line["rollout_corr/k3_kl"] for line in fresh) < 1e-6
    assert stale[0]["rollout_corr/k3_kl"] < 1e-6 < 1e-4 < stale[1]["rollout_corr/k3_kl"]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("dtype", [None, "float16", "float8_e4m3"])
def test_a_stale_engine_gets_copies_of_earlier_weights(
    model: PreTrainedModel, policy_folder: Path, staleness: int, dtype: str | None
) -> None:
    """The weights change in place after each call, as an optimizer changes them."""
    sampler = PlainSampler(policy_folder)
    weight_sync = WeightSync(sampler, Disturbance.model_validate({"staleness": staleness, "weights": dtype}))
    history = []
    for _ in range(5):
        history.append({name: w.clone() for name, w in round_weights(named_weights(model), dtype)})
        weight_sync(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
    for n, handed in enumerate(sampler.handed):
        expected = history[max(0, n - staleness)]
        assert handed.keys() == expected.keys()
        assert all(torch.equal(handed[name], expected[name]) for name in expected)


@pytest.mark.parametrize("staleness", rest_long((0,), (0, 1)))
def test_staleness_zero_is_no_disturbance(
    files: Path, policy_folder: Path, plain_samplers: list[PlainSampler], staleness: int
) -> None:
    """With k = 0 a run is the undisturbed one to the bit; with k = 1 it is not."""
    timed = ("time/", "throughput/")
    plain, other = (
        [
            {k: v for k, v in line.items() if not k.startswith(timed)}
            for line in trained(files, policy_folder, {"disturbance": disturbance})
        ]
        for disturbance in ({}, {"staleness": staleness})
    )
    assert len(plain_samplers) == 2
    assert (plain == other) == (staleness == 0)


@pytest.mark.usefixtures("plain_samplers")
def test_the_matched_control_of_staleness_has_old_samples_and_no_mismatch(files: Path, policy_folder: Path) -> None:
    one, both = (
        trained(files, policy_folder, {"disturbance": {"staleness": 2, "side": side}}) for side in ("sampler", "both")
    )
    # The first update is the same in both; the second is on the same responses, scored with other weights.
    for name in ("train/loss", "train/grad_norm", "reward/mean"):
        assert one[0][name] == both[0][name]
    assert one[1]["reward/mean"] == both[1]["reward/mean"] and one[1]["train/loss"] != both[1]["train/loss"]
    assert all(line["rollout_corr_unmasked/delta_abs_max"] < 1e-4 for line in both)
    assert one[1]["rollout_corr_unmasked/delta_abs_max"] > 1e-2


def test_the_matched_control_of_staleness_delays_the_gradient(model: PreTrainedModel, policy_folder: Path) -> None:
    """A step of SGD moves the present weights by the gradient that the old ones have on the same responses."""
    run = run_of({"disturbance": {"staleness": 1, "side": "both"}}, max_grad_norm=1e9)
    samples = samples_of(*make_rollouts(), run)
    weight_sync = WeightSync(PlainSampler(policy_folder), run.disturbance)
    weight_sync(model)
    old = {name: weight.clone() for name, weight in named_weights(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    weight_sync(model)
    present = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss, _, _ = update(model, optimizer, samples, run, 0, Stopwatch(), weight_sync.delayed)
    moved = {name: (p.detach() - present[name]) for name, p in model.named_parameters()}

    model.load_state_dict(old)
    undisturbed = run_of({}, max_grad_norm=1e9)
    expected, _, _ = update(model, torch.optim.SGD(model.parameters(), lr=0.5), samples, undisturbed, 0, Stopwatch())
    assert loss == expected
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moved[name], parameter.detach() - old[name], rtol=1e-3, atol=1e-6)


# --- one side and both -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [{}, DVP], ids=["full", "min_p"])
@pytest.mark.parametrize("cause", rest_long(("all",), CAUSES))
@pytest.mark.usefixtures("plain_samplers")
def test_the_matched_control_has_no_mismatch(
    files: Path, policy_folder: Path, cause: str, vocabulary: dict[str, Any]
) -> None:
    """What the engines themselves differ by is left; the same disturbance of the sampler alone shows."""
    one, both = (
        trained(
            files, policy_folder, {"vocabulary": vocabulary, "disturbance": {**CAUSES[cause], "side": side}}, steps=2
        )
        for side in ("sampler", "both")
    )
    for line in both:
        assert line["rollout_corr_unmasked/delta_abs_max"] < 1e-4 and line["rollout_corr/delta_abs_max"] < 1e-4
        assert line["dvp/sampled_outside_train_support_count"] == 0
        assert line["dvp/kept_mass_train_mean"] == pytest.approx(line["dvp/kept_mass_rollout_mean"], abs=1e-5)
    # The responses of the first step are the same in both runs.
    assert one[0]["reward/mean"] == both[0]["reward/mean"]
    least = {"floor": 1e-3, "weights": 1e-4}.get(cause, 0.1)
    assert one[0]["rollout_corr_unmasked/delta_abs_mean"] > least


@pytest.mark.slow  # `test_vllm.py` has the same of the real engine
@pytest.mark.usefixtures("plain_samplers")
def test_noise_on_one_side_has_its_given_size(files: Path, policy_folder: Path) -> None:
    """K1 and K3 of sampled tokens of a nearly flat policy: σ²/2 each; an interval of 99.9 % over the tokens."""
    sigma = 0.3
    trained(
        files, policy_folder, {"disturbance": {"noise": sigma}}, steps=1, prompts=8, group_size=16, max_new_tokens=20
    )
    tokens = np.load(files / "tokens.npz")
    delta = tokens["logp_train"].astype(float) - tokens["logp_infer"].astype(float)
    assert len(delta) > 2000
    for values in (-delta, np.expm1(delta) - delta):
        half_width = 3.29 * values.std(ddof=1) / np.sqrt(len(values))
        assert half_width < sigma**2 / 4
        assert abs(values.mean() - sigma**2 / 2) < half_width


@pytest.mark.parametrize("cause", ["noise", "all"])
def test_an_update_of_the_matched_control_is_the_definition(
    model: PreTrainedModel, policy_folder: Path, cause: str
) -> None:
    """Loss and gradient on disturbed min-p logits, float64, one token at a time; rounding is straight-through."""
    run = run_of({"vocabulary": DVP, "disturbance": {**CAUSES[cause], "side": "both"}})
    samples = samples_of(*make_rollouts(), run)
    plain = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64, attn_implementation="eager")
    settings = run.disturbance
    plain.load_state_dict(dict(round_weights(named_weights(model), settings.weights)))
    bias_V = settings.bias * normal([0], [0], 600, "disturbance.bias")[0].double()
    terms, outside = [], 0
    for sample in samples:
        rollout = sample.rollout
        row = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
        logits_TV = plain(row).logits[0, len(rollout.prompt_tokens) - 1 : -1] / run.training.temperature
        for position, (logits_V, token) in enumerate(zip(logits_TV, rollout.tokens, strict=True)):
            noise_V = settings.noise * normal([sample.seed], [position], 600, "disturbance.noise")[0].double()
            probs_V = (1 - settings.floor) * (logits_V + bias_V + noise_V).softmax(-1) + settings.floor / 600
            plainly = disturbed(logits_V.tolist(), bias_V.tolist(), noise_V.tolist(), settings.floor)
            np.testing.assert_allclose(probs_V.detach(), plainly, rtol=1e-9)
            safe_V = torch.tensor(safe_tokens(plainly, "min_p", np.log(RHO)))
            outside += not safe_V[token]
            if safe_V[token]:
                logp = (probs_V[token] / torch.where(safe_V, probs_V, 0.0).sum()).log()
                terms.append(-sample.advantage * logp / len(samples))
    expected = torch.stack(terms).sum()
    expected.backward()
    assert 0 < outside < len(terms)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss, norm, record = update(model, optimizer, samples, run, 0, Stopwatch())
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-4)
    assert record.metrics()["dvp/sampled_outside_train_support_count"] == outside
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_sampler_side_leaves_the_trainer_alone(model: PreTrainedModel) -> None:
    results = []
    for disturbance in ({}, CAUSES["all"]):
        run = run_of({"vocabulary": DVP, "disturbance": disturbance})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss, norm, record = update(model, optimizer, samples_of(*make_rollouts(), run), run, 0, Stopwatch())
        results.append((loss, norm, record.metrics()))
    assert results[0][:2] == results[1][:2]
    assert results[0][2] == pytest.approx(results[1][2], rel=0, abs=0, nan_ok=True)


@pytest.mark.usefixtures("plain_samplers")
def test_a_budget_that_starts_below_the_floor_is_warned_of(files: Path, policy_folder: Path) -> None:
    budget = {"rule": "min_p", "rho": "e-13", "adapt": "budget", "budget": 0.1}
    with pytest.warns(UserWarning, match=r"arm test: the floor of 0\.1 lifts every token over the cut of min_p"):
        trained(files, policy_folder, {"vocabulary": budget, "disturbance": {"floor": 0.1}}, steps=1)
