"""The two losses against loops and derivatives written out by hand."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tailrl.config.arm import Correction
from tailrl.config.reference_kl import ReferenceKL
from tailrl.objective.corrections import correct
from tailrl.objective.loss import LossInputs, loss, policy_gradient, ratio_loss, surrogate
from tailrl.objective.ratio_losses import RATIO_LOSSES, VESPO_BOUNDS
from tailrl.objective.safe_set import token_logprobs
from tailrl.runtime.errors import StudyError

MIS = Correction(sequence="mis", sequence_threshold=2.0)
LOW, HIGH = 0.2, 0.3


def test_each_log_prob_is_pushed_by_its_weight_and_advantage() -> None:
    rng = np.random.default_rng(0)
    logp, advantage = torch.tensor(rng.normal(size=7), requires_grad=True), torch.tensor(rng.normal(size=7))
    weight = torch.tensor([1.5, 1.0, 0.0, 0.3, 1.0, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
    loss = policy_gradient(logp, advantage, weight, step_sequences=10)
    loss.backward()
    terms = [-w * a / 10 for w, a in zip(weight.tolist(), advantage.tolist(), strict=True)]
    np.testing.assert_allclose(logp.grad, terms, atol=1e-12)
    assert loss.item() == pytest.approx(sum(t * v for t, v in zip(terms, logp.tolist(), strict=True)))
    assert weight.grad is None


def test_micro_batches_add_up_to_one_batch() -> None:
    rng = np.random.default_rng(1)
    lengths = [3, 1, 0, 5, 2, 4]
    sequence = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    logp, delta = torch.tensor(rng.normal(size=15), requires_grad=True), torch.tensor(rng.normal(0, 0.3, 15))
    outside = torch.arange(15) == 6
    advantage = torch.tensor(rng.normal(size=6))[sequence]

    def gradient(groups: list[list[int]]) -> torch.Tensor:
        total = torch.zeros(15, dtype=torch.float64)
        for group in groups:
            place = torch.tensor([group.index(n) if n in group else -1 for n in sequence.tolist()])
            here = place >= 0
            weights = correct(delta[here], outside[here], place[here], len(group), MIS, 0 * delta[here])
            loss = policy_gradient(logp[here], advantage[here], weights.weight_T, len(lengths))
            total += torch.autograd.grad(loss, logp)[0]
        return total

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    assert whole.abs().max() > 0
    for groups in ([[5, 4, 3, 2, 1, 0]], [[0], [1], [2], [3], [4], [5]], [[3, 0], [1, 2, 5], [4]]):
        torch.testing.assert_close(gradient(groups), whole, rtol=0, atol=1e-14)


# --- the whole loss: one record in, one out ----------------------------------------------------------


def inputs_of(**changes: object) -> LossInputs:
    """Six tokens of two responses; the last one lies outside the trainer's set."""
    rng = np.random.default_rng(4)
    logits_TV = torch.tensor(rng.normal(size=(6, 5)), requires_grad=True)
    tokens_T = torch.tensor([0, 1, 2, 3, 4, 0])
    trainer = token_logprobs(logits_TV, tokens_T, "min_p", math.log(0.05))
    trainer = replace(trainer, outside_T=torch.arange(6) == 5, logp_T=trainer.logp_T * (torch.arange(6) != 5))
    fields = {
        "trainer": trainer,
        "logp_sampler_T": (trainer.logp_T.detach() + torch.tensor(rng.normal(0, 0.1, 6))).clamp(max=0),
        "advantage_T": torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5], dtype=torch.float64),
        "sequence_T": torch.tensor([0, 0, 0, 1, 1, 1]),
        "sequences": 2,
        "denominator": 8,
    }
    return LossInputs(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("correction", [None, Correction(token="tis", token_threshold=1.05)])
def test_the_denominator_divides_from_the_start(correction: Correction | None) -> None:
    """Written out: −(1/B) Σ w A log π, a token outside the set without a term, and its response without a weight."""
    inputs = inputs_of()
    outputs = loss(inputs, correction=correction)
    weight = (inputs.trainer.logp_T.detach() - inputs.logp_sampler_T).exp().clamp(max=1.05)
    if correction is None:
        weight = torch.ones(6)
    else:
        weight[3:] = 0.0
    terms = weight * inputs.advantage_T * inputs.trainer.logp_T
    assert outputs.loss.item() == pytest.approx(-terms[:5].sum().item() / 8, rel=1e-12)
    assert loss(inputs_of(denominator=16), correction=correction).loss.item() == pytest.approx(outputs.loss.item() / 2)
    older = surrogate(
        inputs.trainer, inputs.logp_sampler_T, inputs.advantage_T, inputs.sequence_T, 2, 8, correction or Correction(),
        None,
    )  # fmt: skip
    assert older.loss.item() == outputs.loss.item()


def test_what_it_was_made_of_is_its_metrics() -> None:
    inputs = inputs_of()
    metrics = loss(inputs, correction=MIS).metrics
    delta = (inputs.trainer.logp_T.detach() - inputs.logp_sampler_T)[:5].numpy()
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(np.mean(np.exp(delta) - 1 - delta), rel=1e-9)
    assert metrics["dvp/sampled_outside_train_support_count"] == 1
    assert metrics["dvp/kept_mass_train_mean"] == pytest.approx(inputs.trainer.log_kept_T.exp().mean().item())
    old_T = inputs.logp_sampler_T.masked_fill(torch.arange(6) == 2, -torch.inf)
    earlier = loss(inputs_of(logp_old_T=old_T), correction=MIS).metrics
    assert earlier["rollout_corr/k3_kl"] == pytest.approx(0, abs=1e-15), "before the first update nothing differed"
    assert earlier["dvp/sampled_outside_train_support_count"] == 2


def test_a_kl_from_the_reference_is_part_of_the_loss() -> None:
    settings = ReferenceKL(coefficient=0.5, estimator="k3")
    reference_T = torch.full((6,), -1.0, dtype=torch.float64)
    inputs = inputs_of(logp_reference_T=reference_T)
    added = loss(inputs, reference_kl=settings).loss - loss(inputs).loss
    apart = (reference_T - inputs.trainer.logp_T)[:5].detach().numpy()
    assert added.item() == pytest.approx(0.5 / 8 * (np.exp(apart) - 1 - apart).sum(), rel=1e-9)
    in_reward = settings.model_copy(update={"where": "reward"})
    assert loss(inputs, reference_kl=in_reward).loss.item() == loss(inputs).loss.item()
    with pytest.raises(StudyError, match="reference_kl needs the reference policy's log-probs of every token"):
        loss(inputs_of(), reference_kl=settings)


# --- the ratio's losses -------------------------------------------------------------------------------


def alone(logp: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Each token in a sequence of its own."""
    return torch.arange(len(logp)), len(logp)


def ratios_and_advantages() -> list[tuple[float, float]]:
    """Ratios far below, just in, inside, just out and far above the bounds, with advantages of each sign and zero."""
    ratios = [0.01, 0.79, 0.81, 1.0, 1.29, 1.31, 20.0]
    return list(itertools.product(ratios, [2.0, 0.7, -0.4, -1.5, 0.0]))


def test_the_clipped_ratio_is_the_definition() -> None:
    """Value, gradient and flags; where the clipped branch is the smaller one, no gradient flows."""
    pairs = ratios_and_advantages()
    rng = np.random.default_rng(3)
    old, weights = rng.normal(-3, 1, len(pairs)), rng.uniform(0, 2, len(pairs))
    moved = [o + math.log(r) for o, (r, _) in zip(old, pairs, strict=True)]
    logp = torch.tensor(moved, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(old, requires_grad=True)
    weight = torch.tensor(weights, requires_grad=True)
    advantage = torch.tensor([a for _, a in pairs], dtype=torch.float64)
    loss, clipped = ratio_loss("ppo", logp, reference, advantage, weight, *alone(logp), (LOW, HIGH), step_sequences=9)
    loss.backward()
    value, gradient, flags = 0.0, [], []
    for z, o, (_, a), w in zip(logp.tolist(), old, pairs, weights, strict=True):
        ratio = math.exp(z - o)
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        value += -w * min(ratio * a, bounded * a) / 9
        stopped = (a > 0 and ratio > 1 + HIGH) or (a < 0 and ratio < 1 - LOW)
        gradient.append(0.0 if stopped else -w * a * ratio / 9)
        flags.append(stopped)
    assert loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(logp.grad, gradient, rtol=1e-9, atol=1e-15)
    assert clipped.tolist() == flags and 0 < sum(flags) < len(flags)
    assert reference.grad is None and weight.grad is None


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    """max(min(r A, clip(r) A), c A) where A < 0 (arXiv 1912.09729): a constant with no gradient above r = c."""
    cases = [(10.0, -1.0, 3.0, 0.0), (2.9, -1.0, 2.9, -2.9), (3.1, -2.0, 6.0, 0.0), (10.0, 1.0, -(1 + HIGH), 0.0)]
    cases += [(0.1, -1.0, 1 - LOW, 0.0), (0.1, 1.0, -0.1, 0.1), (10.0, 0.0, 0.0, 0.0)]
    for ratio, advantage, value, gradient in cases:
        logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        tokens = (torch.zeros(1), torch.tensor([advantage], dtype=torch.float64), torch.ones(1), *alone(logp))
        loss, acts = ratio_loss("ppo", logp, *tokens, (LOW, HIGH), 1, dual=3.0)
        (found,) = torch.autograd.grad(loss, logp)
        assert loss.item() == pytest.approx(value, rel=1e-12)
        assert -found.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
        assert acts.item() == (gradient == 0 and advantage != 0)


def test_a_ratio_that_moves_the_wrong_way_is_not_clipped() -> None:
    """PPO's minimum is pessimistic: far off on the losing side, the gradient is the whole one."""
    logp = torch.tensor([math.log(5.0), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    loss, clipped = ratio_loss("ppo", logp, torch.zeros(2), advantage, torch.ones(2), *alone(logp), (LOW, HIGH), 1)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert not clipped.any()
    assert gradient.tolist() == pytest.approx([5.0, -0.1])


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_at_ratio_one_it_is_the_policy_gradient(name: str) -> None:
    rng = np.random.default_rng(4)
    logp = torch.tensor(rng.normal(-3, 1, 20), requires_grad=True)
    advantage, weight = torch.tensor(rng.normal(size=20)), torch.tensor(rng.uniform(0, 2, 20))
    where = torch.arange(20) // 3, 7
    loss, clipped = ratio_loss(name, logp, logp.detach(), advantage, weight, *where, (LOW, HIGH), 7)
    plain = policy_gradient(logp, advantage, weight, 7)
    assert not clipped.any()
    torch.testing.assert_close(
        torch.autograd.grad(loss, logp)[0], torch.autograd.grad(plain, logp)[0], rtol=0, atol=1e-15
    )


def by_hand(name: str, logp: list[float], old: list[float], advantage: list[float], sequence: list[int]) -> list[float]:
    """Each token's term times the derivative of its log-prob, from the papers' formulas."""
    gradient = []
    for z, o, a, n in zip(logp, old, advantage, sequence, strict=True):
        own = [zz - oo for zz, oo, m in zip(logp, old, sequence, strict=True) if m == n]
        r = math.exp(z - o)
        if name == "gspo":
            r = math.exp(sum(own) / len(own))
        if name in ("ppo", "gspo"):
            gradient.append(0.0 if (a > 0 and r > 1 + HIGH) or (a < 0 and r < 1 - LOW) else r * a)
        elif name == "free":
            gradient.append(r * a)
        elif name == "cispo":
            gradient.append(min(max(r, 1 - LOW), 1 + HIGH) * a)
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            gradient.append(4 * gate * (1 - gate) * r * a)
        else:
            k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            w = math.exp(min(max(sum(own), VESPO_BOUNDS[0]), VESPO_BOUNDS[1]))
            gradient.append(w**k * math.exp(decay * (1 - w)) * a)
    return gradient


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_every_loss_of_the_ratio_has_the_gradient_of_its_formula(name: str) -> None:
    """With responses of several tokens, ratios on both sides of the bounds, and advantages of both signs and zero."""
    rng = np.random.default_rng(6)
    lengths = (1, 4, 2, 7, 3, 1, 5, 2)
    sequence = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    old = rng.normal(-3, 1, len(sequence))
    moved = rng.normal(0, 0.3, len(old)) + 0.5 * rng.normal(size=len(lengths))[sequence]
    logp = torch.tensor(old + moved, requires_grad=True)
    advantage = torch.tensor([0.8, -1.0, 0.0, 0.5, -0.2, -3.0, 1.0, -0.7], dtype=torch.float64)[sequence]
    weight = torch.tensor(rng.uniform(0, 2, len(old)))
    where = sequence, len(lengths)
    loss, clipped = ratio_loss(name, logp, torch.tensor(old), advantage, weight, *where, (LOW, HIGH), 11)
    (gradient,) = torch.autograd.grad(loss, logp)
    terms = by_hand(name, logp.tolist(), old.tolist(), advantage.tolist(), sequence.tolist())
    np.testing.assert_allclose(gradient, [-w * t / 11 for w, t in zip(weight.tolist(), terms, strict=True)], rtol=1e-9)
    assert bool(clipped.any()) == (name in ("ppo", "gspo", "cispo"))


def test_vespo_is_bounded_where_a_response_has_moved_far() -> None:
    logp = torch.tensor([-1.0, -80.0], requires_grad=True)
    old, advantage = torch.tensor([-60.0, -1.0]), torch.tensor([1.0, -1.0])
    loss, _ = ratio_loss("vespo", logp, old, advantage, torch.ones(2), *alone(logp), (LOW, HIGH), 1)
    assert torch.autograd.grad(loss, logp)[0].abs().max() < 1e-6 and loss.isfinite()
