"""A replayed sampling mask against an oracle in float64 that shares no code with the package.

log p(y)/Σ_{a in S} p(a) on the sampler's set S, whose top-p, min-p and top-k are loops over sorted probabilities here.
Its gradient is written by hand, y's one-hot minus p on S, all over the temperature. `test_whole_rows.py` compares the
chunked rows with the repository's own definitions instead.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from step_fixture import run_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrl.config.arm import Correction
from tailrl.config.vocabulary import Vocabulary
from tailrl.kernels import whole_rows
from tailrl.kernels.whole_rows import whole_row_scores
from tailrl.model.policy import named_weights
from tailrl.rollout.types import Rollout
from tailrl.training.samples import Sample
from tailrl.training.scorer import make_scorer
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch

T, H, V = 29, 7, 40
TEMPERATURE = 0.7
Floats = NDArray[np.float64]

RULES: dict[str, tuple[dict[str, Any], float]] = {
    "top_p": ({"rule": "top_p", "p": 0.5}, 0.5),
    "min_p": ({"rule": "min_p", "rho": 0.3}, math.log(0.3)),
    "top_k": ({"rule": "top_k", "k": 5}, 5.0),
}


def kept(logits_V: Sequence[float], rule: str, threshold: float) -> list[int]:
    """The tokens of the set, most probable first; fails where float32 could place a token on the other side."""
    largest = max(logits_V)
    weights = [math.exp(z - largest) for z in logits_V]
    probs = [w / math.fsum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    found: list[int] = []
    for token in order:
        mass = math.fsum(probs[a] for a in found)
        wanted = {
            "top_p": mass < threshold,
            "min_p": probs[token] >= math.exp(threshold) * probs[order[0]],
            "top_k": len(found) < threshold,
        }[rule]
        near = {
            "top_p": abs(mass - threshold),
            "min_p": abs(math.log(probs[token] / probs[order[0]]) - threshold),
            "top_k": 1.0,
        }[rule]
        assert near > 2e-6, "the case is at its limit"
        if not wanted:
            break
        found.append(token)
    return found


def renormalised(logits_V: Floats, tokens: list[int], sampled: int) -> tuple[float, float, float, Floats]:
    """log p on the set, log of its mass, its entropy, and the gradient of the first by the logits."""
    largest = logits_V.max()
    inside = math.fsum(math.exp(logits_V[a] - largest) for a in tokens)
    everything = math.fsum(math.exp(z - largest) for z in logits_V)
    gradient_V, entropy = np.zeros_like(logits_V), 0.0
    for a in tokens:
        p = math.exp(logits_V[a] - largest) / inside
        gradient_V[a] -= p
        entropy -= p * math.log(p)
    gradient_V[sampled] += 1.0
    return logits_V[sampled] - largest - math.log(inside), math.log(inside / everything), entropy, gradient_V


def drawn_from(tokens: list[int], rng: np.random.Generator) -> int:
    """Half of the time the set's least probable token, which the trainer's own set may lack."""
    return tokens[-1] if rng.random() < 0.5 else tokens[rng.integers(len(tokens))]


@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients_are_those_of_the_samplers_set(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "LOGITS_AT_ONCE", 6 * V)  # chunks, the last one short
    settings, threshold = RULES[rule]
    rng = np.random.default_rng(11)
    hidden_TH, weight_VH = (rng.standard_normal((n, H)).astype(np.float32).astype(float) for n in (T, V))
    logits_TV = hidden_TH @ weight_VH.T / TEMPERATURE
    sampler_TV = (logits_TV + 0.8 * rng.standard_normal((T, V))).astype(np.float32).astype(float)
    advantage_T = rng.standard_normal(T)
    sets = [kept(row.tolist(), rule, threshold) for row in sampler_TV]
    tokens = [drawn_from(own, rng) for own in sets]
    lacking = [y not in kept(row.tolist(), rule, threshold) for row, y in zip(logits_TV, tokens, strict=True)]
    assert sum(lacking) > 3  # else the trainer's set would do as well
    wanted = [renormalised(*row) for row in zip(logits_TV, sets, tokens, strict=True)]
    by_logits_TV = np.stack([a * row[3] for a, row in zip(advantage_T, wanted, strict=True)]) / TEMPERATURE

    hidden, weight = (torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (hidden_TH, weight_VH))
    found, centre = whole_row_scores(
        hidden,
        weight,
        torch.tensor(tokens),
        torch.tensor(sampler_TV, dtype=torch.float32),
        torch.full((T, 1), threshold),
        TEMPERATURE,
        Vocabulary(**settings, side="replay"),
        Correction(),
    )
    assert centre is None and not found.outside_T.any()
    assert found.kept_vocab_T.tolist() == [len(own) for own in sets]
    for own, place in ((found.logp_T, 0), (found.log_kept_T, 1), (found.entropy_T, 2)):
        np.testing.assert_allclose(own.detach().numpy(), [row[place] for row in wanted], rtol=1e-5, atol=5e-6)
    (torch.tensor(advantage_T, dtype=torch.float32) * found.logp_T).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    np.testing.assert_allclose(hidden.grad.numpy(), by_logits_TV @ weight_VH, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(weight.grad.numpy(), by_logits_TV.T @ hidden_TH, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_written_by_hand_is_that_of_differences(rule: str) -> None:
    rng, threshold = np.random.default_rng(3), RULES[rule][1]
    logits_V, sampler_V = 2 * rng.standard_normal(V), 2 * rng.standard_normal(V)
    tokens, step = kept(sampler_V.tolist(), rule, threshold), 1e-5
    *_, gradient_V = renormalised(logits_V, tokens, tokens[-1])
    for a in range(V):
        up, down = (renormalised(logits_V + s * step * np.eye(V)[a], tokens, tokens[-1])[0] for s in (1, -1))
        assert gradient_V[a] == pytest.approx((up - down) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_reaches_a_models_weights(rule: str, model: PreTrainedModel, policy_folder: Path) -> None:
    """An update of the tiny policy, beside its copy in float64 that scores one response at a time."""
    settings, threshold = RULES[rule]
    run = run_of({"vocabulary": {**settings, "side": "replay"}}, prompts=3, group_size=2)
    plain = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64, attn_implementation="eager")
    plain.load_state_dict(dict(named_weights(model)))
    rng, samples, total, lacking = np.random.default_rng(7), [], 0.0, 0
    for seed, advantage in enumerate((1.5, -0.5, 0.75, -1.0, 0.25, -1.25)):
        prompt, size = rng.integers(2, 600, 3).tolist(), int(rng.integers(2, 9))
        # The next tokens are the response's own, so that it is drawn token by token.
        response: list[int] = []
        rows, sets = [], []
        for _ in range(size):
            with torch.no_grad():
                own_V = plain(torch.tensor([[*prompt, *response]])).logits[0, -1].numpy() / run.training.temperature
            rows.append((own_V + 1.5 * rng.standard_normal(len(own_V))).astype(np.float32))
            sets.append(kept(rows[-1].tolist(), rule, threshold))
            response.append(drawn_from(sets[-1], rng))
            lacking += response[-1] not in kept(own_V.tolist(), rule, threshold)
        logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / run.training.temperature
        scored = [renormalised(*row) for row in zip(logits.detach().numpy(), sets, response, strict=True)]
        total -= advantage * sum(row[0] for row in scored) / 6
        logits.backward(torch.from_numpy(np.stack([-advantage / 6 * row[3] for row in scored])))
        logq = [renormalised(*row)[:2] for row in zip(map(np.float64, rows), sets, response, strict=True)]
        logp_T, log_kept_T = np.array(logq, np.float32).T
        sizes_T = np.array([len(own) for own in sets], np.int32)
        given = Rollout(
            tuple(prompt), tuple(response), logp_T, log_kept_T, sizes_T, stopped=True, logits_sampler_KV=tuple(rows)
        )
        samples.append(Sample(given, advantage, threshold, seed))
    assert lacking > 3
    loss, _ = accumulate_gradients(model, samples, make_scorer(run), Stopwatch())
    assert loss == pytest.approx(total, rel=1e-5, abs=1e-5)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=0, atol=1e-4 * scale + 1e-7, msg=name)
