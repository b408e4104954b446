"""Several updates on one set of rollouts: who is trained on when, and the three conventions of the ratio.

The oracle is transformers' own forward in float64, one sequence at a time, and loops over the tokens.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from definitions import safe_tokens
from step_fixture import DVP, RHO, make_rollouts, run_of, samples_of
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.model.policy import named_weights
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.tracking.metrics import METRICS
from tailrl.training import step
from tailrl.training.optimizer import optimizer_step
from tailrl.training.samples import Sample
from tailrl.training.scorer import Scorer, make_scorer, score_all
from tailrl.training.step import accumulate_gradients, update
from tailrl.training.stopwatch import Stopwatch
from tailrl.training.token_table import TokenTable

RATIOS = ("recompute", "bypass", "decoupled")


def run_with(ratio: str | None, correction: dict[str, Any] | None = None, **training: Any) -> Run:
    arm: dict[str, Any] = {"vocabulary": DVP, "correction": correction or {}}
    arm |= {"clip": {"ratio": ratio, "low": 0.1, "high": 0.15}} if ratio else {"deliberate": True}
    return run_of(arm, **training)


def samples(run: Run) -> list[Sample]:
    return samples_of(*make_rollouts(), run)


def perturb(model: PreTrainedModel, size: float = 0.005) -> None:
    """Move the policy away from the one that the old log-probs are of."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def gradient_of(model: PreTrainedModel) -> Tensor:
    gradients = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(gradients)


# --- the oracle ----------------------------------------------------------------------------------------


def plain_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The same weights in transformers' own eager implementation, float64."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    plain.load_state_dict(dict(named_weights(model)))
    return plain


def plain_logprobs(plain: PreTrainedModel, chosen: Sequence[Sample], run: Run) -> list[list[Tensor | None]]:
    """log π^mp of every token, with gradient; None where it lies outside the safe set."""
    every = []
    for sample in chosen:
        rollout, found = sample.rollout, []
        row = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
        probs_TV = (plain(row).logits[0, len(rollout.prompt_tokens) - 1 : -1] / run.training.temperature).softmax(-1)
        for probs_V, token in zip(probs_TV, rollout.tokens, strict=True):
            safe_V = torch.tensor(safe_tokens(probs_V.tolist(), "min_p", math.log(RHO)))
            found.append((probs_V[token] / probs_V[safe_V].sum()).log() if safe_V[token] else None)
        every.append(found)
    return every


def plain_loss(
    new: list[list[Tensor | None]], old: list[list[float | None]], chosen: Sequence[Sample], run: Run
) -> tuple[Tensor, list[bool]]:
    """The clipped loss of the update, and which of the tokens inside the set are clipped, token by token."""
    assert run.clip is not None
    low, high = 1 - run.clip.low, 1 + run.clip.high
    terms, clipped = [], []
    for new_T, old_T, sample in zip(new, old, chosen, strict=True):
        sampler_T = sample.rollout.logp_sampler_T.astype(float)
        outside = [n is None or o is None for n, o in zip(new_T, old_T, strict=True)]
        weight = 1.0
        if run.correction.sequence == "mis":
            ratio = math.exp(sum(o - i for o, i in zip(old_T, sampler_T, strict=True) if o is not None))
            weight = 0.0 if any(outside) or ratio > run.correction.limit else ratio
        if run.correction.sequence == "reject_k3":
            deltas = [o - i for o, i in zip(old_T, sampler_T, strict=True) if o is not None]
            mean = sum(math.exp(d) - d - 1 for d in deltas) / len(old_T)
            weight = 0.0 if any(outside) or mean > run.correction.limit else 1.0
        for n, o, infer, is_outside in zip(new_T, old_T, sampler_T, outside, strict=True):
            if is_outside:
                continue
            assert n is not None and o is not None
            reference = infer if run.clip.ratio == "bypass" else o
            times = math.exp(o - infer) if run.clip.ratio == "decoupled" else 1.0
            ratio_T = (n - reference).exp()
            free, bounded = ratio_T * sample.advantage, ratio_T.clamp(low, high) * sample.advantage
            clipped.append(bool(bounded < free))
            terms.append(-weight * times * torch.minimum(free, bounded) / len(chosen))
    return torch.stack(terms).sum(), clipped


def assert_same_gradients(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=0, atol=1e-4 * scale + 1e-7, msg=name)


# --- the ratios ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "correction"),
    [
        *((ratio, {}) for ratio in RATIOS),
        ("recompute", {"sequence": "mis", "sequence_threshold": 2.0}),
        ("decoupled", {"sequence": "reject_k3", "sequence_threshold": 0.5}),
    ],
)
def test_a_later_update_is_the_definition(
    model: PreTrainedModel, policy_folder: Path, ratio: str, correction: dict[str, Any]
) -> None:
    run = run_with(ratio, correction)
    chosen = samples(run)
    before = score_all(model, chosen, make_scorer(run))
    first = plain_logprobs(plain_model(model, policy_folder), chosen, run)
    old = [[None if value is None else value.item() for value in row] for row in first]
    for found, expected in zip(before, old, strict=True):
        values = [-math.inf if value is None else value for value in expected]
        np.testing.assert_allclose(found.in_set(), values, atol=1e-4)
    perturb(model)
    plain = plain_model(model, policy_folder)
    loss, record = accumulate_gradients(
        model, chosen, make_scorer(run), Stopwatch(), None if ratio == "bypass" else before
    )
    new = plain_logprobs(plain, chosen, run)
    if ratio == "bypass":
        old = [[None if value is None else value.item() for value in row] for row in new]
    expected_loss, clipped = plain_loss(new, old, chosen, run)
    expected_loss.backward()
    assert loss == pytest.approx(expected_loss.item(), rel=1e-4, abs=1e-6)
    assert_same_gradients(model, plain)
    assert 0 < sum(clipped) < len(clipped)
    # A token outside the set has no ratio, so none is clipped.
    assert record.clipped_T.sum().item() == sum(clipped)
    assert any(row.count(None) for row in new), "some tokens are outside the set"


@pytest.mark.parametrize("ratio", ["recompute", "decoupled"])
def test_the_first_update_has_ratio_one(model: PreTrainedModel, ratio: str) -> None:
    """recompute: the gradient without a clip. decoupled: the same, each token times exp(Δ_t)."""
    run = run_with(ratio)
    _, record = accumulate_gradients(model, samples(run), make_scorer(run), Stopwatch())
    assert not record.clipped_T.any()
    clipped = gradient_of(model)
    if ratio == "recompute":
        plain = run_with(None)
        accumulate_gradients(model, samples(plain), make_scorer(plain), Stopwatch())
        torch.testing.assert_close(clipped, gradient_of(model), rtol=0, atol=1e-6 * clipped.abs().max().item())
    else:
        # Token importance weights without a bound that matters; they drop whole sequences with an outside token, so
        # that only sequences without one can be compared.
        weighted = run_with(None, {"token": "tis", "token_threshold": 1e9})
        inside = [
            s
            for s, row in zip(samples(run), score_all(model, samples(run), make_scorer(run)), strict=True)
            if not row.outside_T.any()
        ]
        assert len(inside) == 4
        found = []
        for settings in (run, weighted):
            accumulate_gradients(model, inside, make_scorer(settings), Stopwatch())
            found.append(gradient_of(model))
        torch.testing.assert_close(*found, rtol=0, atol=1e-6 * found[0].abs().max().item())


@pytest.mark.parametrize("ratio", RATIOS)
def test_an_outside_token_has_no_part_in_a_clipped_loss(model: PreTrainedModel, ratio: str) -> None:
    """Whatever the sampler's log-prob of it was."""
    run, results = run_with(ratio), []
    for value in (-6.0, -2.0):
        chosen = samples(run)
        for sample, row in zip(chosen, score_all(model, chosen, make_scorer(run)), strict=True):
            sample.rollout.logp_sampler_T[row.outside_T.numpy()] = value
        loss, _ = accumulate_gradients(model, chosen, make_scorer(run), Stopwatch())
        results.append((loss, gradient_of(model)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_a_rho_that_prunes_nothing_is_naive_rloo_to_the_bit(model: PreTrainedModel) -> None:
    results = []
    for vocabulary in ({}, {"rule": "min_p", "rho": "e-60"}, {"rule": "entropy", "rho": "e-60"}):
        run = run_of({"vocabulary": vocabulary})
        loss, record = accumulate_gradients(model, samples(run), make_scorer(run), Stopwatch())
        results.append((loss, gradient_of(model), record.metrics()))
    for loss, gradient, metrics in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])
        assert metrics == pytest.approx(results[0][2], rel=0, abs=0, nan_ok=True)
    assert results[0][1].abs().max() > 0


# --- normalised weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "correction", [{"sequence": "mis", "sequence_threshold": 2.0}, {"token": "tis", "token_threshold": 1.2}]
)
def test_normalised_weights_have_a_mean_of_one_over_the_whole_update(
    model: PreTrainedModel, policy_folder: Path, correction: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient without `normalise`, divided by the mean weight of both micro-batches, from float64 log-probs."""
    monkeypatch.setattr(step, "optimizer_step", lambda *_: 0.0)  # the gradient stays in the model
    found = []
    for normalise in (False, True):
        run = run_with(None, correction | {"normalise": normalise}, token_budget=80)
        loss, _, record = update(model, torch.optim.SGD(model.parameters()), samples(run), run, 0, Stopwatch())
        assert len(record.loss_M) == 2
        found.append((loss, gradient_of(model).double()))
    chosen, weights = samples(run), list[float]()
    for logp_T, sample in zip(plain_logprobs(plain_model(model, policy_folder), chosen, run), chosen, strict=True):
        pairs = zip(logp_T, sample.rollout.logp_sampler_T.astype(float), strict=True)
        ratio_T = [0.0 if logp is None else math.exp(logp.item() - infer) for logp, infer in pairs]
        if run.correction.sequence == "mis":
            weights.append(math.prod(ratio_T) if math.prod(ratio_T) <= run.correction.limit else 0.0)
        else:
            weights += [min(ratio, run.correction.token_threshold) for ratio in ratio_T]
    mean = sum(weights) / len(weights)
    assert abs(mean - 1) > 0.05
    (loss, gradient), (normalised, scaled) = found
    assert normalised == pytest.approx(loss / mean, rel=1e-4)
    torch.testing.assert_close(scaled, gradient / mean, rtol=1e-4, atol=0)


# --- minibatches -----------------------------------------------------------------------------------------


class Spy:
    """Stands before `accumulate_gradients`: what each update was given, and what it came to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samples: list[list[Sample]] = []
        self.old: list[list[TokenLogprobs] | None] = []
        self.losses: list[float] = []

        def spy(
            model: PreTrainedModel,
            samples: Sequence[Sample],
            scorer: Scorer,
            watch: Stopwatch,
            old: Sequence[TokenLogprobs] | None,
            chosen: Sequence[int],
        ) -> tuple[float, TokenTable]:
            self.samples.append([samples[i] for i in chosen])
            self.old.append(None if old is None else [old[i] for i in chosen])
            loss, table = accumulate_gradients(model, samples, scorer, watch, old, chosen)
            self.losses.append(loss)
            return loss, table

        monkeypatch.setattr(step, "accumulate_gradients", spy)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def updated(model: PreTrainedModel, run: Run, seed: int = 0) -> tuple[float, float, TokenTable]:
    return update(model, torch.optim.SGD(model.parameters(), lr=1e-2), samples(run), run, seed, Stopwatch())


def identities(parts: list[list[Sample]]) -> list[list[tuple[int, ...]]]:
    return [[sample.rollout.tokens for sample in part] for part in parts]


@pytest.mark.parametrize("ratio", [None, *RATIOS])
@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (3, [3, 2, 2]), (7, [1] * 7)])
def test_every_sample_is_used_once(
    model: PreTrainedModel, spy: Spy, ratio: str | None, count: int, sizes: list[int]
) -> None:
    run = run_with(ratio, minibatches=count)
    first = score_all(model, samples(run), make_scorer(run))
    loss, norm, record = updated(model, run)
    assert [len(part) for part in spy.samples] == sizes
    used = Counter(tokens for part in identities(spy.samples) for tokens in part)
    assert used == Counter(sample.rollout.tokens for sample in samples(run)) and max(used.values()) == 1
    assert record.responses == 7 and len(record.token_T) == sum(len(tokens) for tokens in used)
    assert loss == pytest.approx(np.mean(spy.losses)) and norm > 0
    assert record.metrics().keys() <= METRICS.keys()
    # The old log-probs are from before the first update, also where a token is outside.
    known = dict(zip(identities([samples(run)])[0], first, strict=True))
    for part, old in zip(spy.samples, spy.old, strict=True):
        if count == 1:
            assert old is None
        else:
            assert old is not None
            for sample, values in zip(part, old, strict=True):
                torch.testing.assert_close(values.in_set(), known[sample.rollout.tokens].in_set(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ratio", [None, *RATIOS])
def test_the_mismatch_is_measured_before_the_first_update(model: PreTrainedModel, ratio: str | None) -> None:
    """r_corr: the updates of a step are no mismatch."""
    alone, several = (run_with(ratio, minibatches=count) for count in (1, 3))
    chosen = samples(alone)
    _, record = accumulate_gradients(model, chosen, make_scorer(alone), Stopwatch())
    before = record.metrics()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    after = update(model, optimizer, samples(several), several, 0, Stopwatch())[2].metrics()
    names = [name for name in METRICS if name.startswith(("rollout_corr/", "rollout_corr_unmasked/", "dvp/"))]
    compared = {name: before[name] for name in names if name in before and "rollout_is" not in name}
    assert len(compared) > 30
    same = {name: after[name] == pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in compared.items()}
    assert all(same.values()), [name for name, close in same.items() if not close]


@pytest.mark.parametrize(("ratio", "correction"), [(None, {}), (None, {"sequence": "tis"}), ("bypass", {})])
def test_log_probs_of_before_the_updates_are_for_the_record_alone(
    model: PreTrainedModel, ratio: str | None, correction: dict[str, Any]
) -> None:
    """Where no ratio is to them, the updates have the same bits as without them."""
    run = run_with(ratio, correction, minibatches=3)
    twin = copy.deepcopy(model)
    updated(model, run, seed=5)
    chosen = samples(run)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for part in np.array_split(np.random.default_rng(5).permutation(len(chosen)), 3):
        accumulate_gradients(twin, [chosen[i] for i in part], make_scorer(run), Stopwatch(), old=None)
        optimizer_step(twin, optimizer, run.training.max_grad_norm)
    for weight, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_the_loss_of_a_minibatch_is_a_mean_over_it(model: PreTrainedModel, spy: Spy) -> None:
    """B is the minibatch's size: one of a single response has the gradient that this response has alone."""
    run = run_with("recompute", minibatches=7)
    gradients: list[Tensor] = []
    for size in (1, 2):
        chosen = [samples(run)[3]] * size
        accumulate_gradients(model, chosen, make_scorer(run), Stopwatch())
        gradients.append(gradient_of(model))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6 * gradients[0].abs().max().item())
    _, norm, _ = updated(model, run_with("recompute"))
    assert norm > 0 and len(spy.samples) == 1


def test_rejection_by_r_ppo_begins_with_the_second_update(model: PreTrainedModel) -> None:
    """However far the engines are apart, and however small the threshold."""
    correction = {"sequence": "reject_k3", "sequence_threshold": 1e-12, "rejects": "r_ppo"}
    run = run_with("recompute", correction, minibatches=7)
    _, _, record = updated(model, run)
    used = record.weights.used_N
    assert used.tolist() == [1.0] + [0.0] * 6


def test_the_seed_deals_the_minibatches(model: PreTrainedModel, spy: Spy) -> None:
    run = run_with("bypass", minibatches=3)
    for seed in (1, 1, 2):
        updated(model, run, seed)
    first, again, other = (identities(spy.samples[i : i + 3]) for i in (0, 3, 6))
    assert first == again != other


def test_one_minibatch_with_a_clip_is_the_plain_update(model: PreTrainedModel) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for ratio in (None, "recompute"):
        model.load_state_dict(start)
        updated(model, run_with(ratio))
        ends.append(torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()]))
    moved = (ends[0] - torch.cat([start[name].flatten() for name, _ in model.named_parameters()])).abs().max().item()
    assert moved > 0
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5 * moved + 1e-8)
