"""A-3PO's proximal log-probs against versions counted by hand, and the loss that they give."""

import math

import pytest
import torch

from tailrl.config.arm import Clip, Correction
from tailrl.objective.loss import surrogate
from tailrl.objective.proximal import interpolation, proximal_logprobs
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.runtime.errors import StudyError


def test_the_share_of_the_way_is_of_the_versions() -> None:
    """α = (v_prox − v_b) / (v_θ − v_b) with v_prox = v_θ − 1; a sample of the policy itself counts as the sampler's."""
    now = 9
    for sampled in range(now + 1):
        wanted = 0.0 if sampled == now else (now - 1 - sampled) / (now - sampled)
        assert interpolation(torch.tensor([now - sampled])).item() == pytest.approx(wanted)


def test_log_probs_are_interpolated_without_gradient() -> None:
    logp = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-2.0, -2.0, -1.0], dtype=torch.float64)
    found = proximal_logprobs(logp, sampler, torch.tensor([0, 2, 4]))
    assert found.tolist() == [-2.0, -1.5, -1.75] and not found.requires_grad
    with pytest.raises(StudyError, match=r"clip\.proximal: loglinear needs the ages of the samples"):
        proximal_logprobs(logp, sampler, None)


@pytest.mark.parametrize("ratio", ["recompute", "decoupled"])
def test_the_loss_is_ppos_against_the_proximal_policy(ratio: str) -> None:
    """−Σ w min(r A, clip(r) A) with r = (π_θ/π_b)^(1−α), and decoupled w = (π_θ/π_b)^α without gradient."""
    gap, ages = [0.3, -0.5, 0.1, 0.9], [4, 4, 0, 2]
    advantage = [1.0, -1.0, 2.0, 1.0]
    sampler = torch.tensor([-1.0] * 4, dtype=torch.float64)
    logp = (sampler + torch.tensor(gap, dtype=torch.float64)).requires_grad_()
    sequence, inside = torch.arange(4), torch.zeros(4, dtype=torch.bool)
    zero = torch.zeros(4, dtype=torch.float64)
    scored = TokenLogprobs(logp, logp.detach(), zero, sequence, zero, inside)
    clip = Clip(ratio=ratio, proximal="loglinear", low=0.2, high=0.2)
    given = (scored, sampler, torch.tensor(advantage, dtype=torch.float64), sequence, 4, 4, Correction(), clip)
    found = surrogate(*given, age_T=torch.tensor(ages))
    total, slopes = 0.0, []
    for g, age, a in zip(gap, ages, advantage, strict=True):
        alpha = (age - 1) / age if age else 0.0
        r, w = math.exp((1 - alpha) * g), math.exp(alpha * g) if ratio == "decoupled" else 1.0
        bound = min(max(r, 0.8), 1.2) * a
        total -= w * min(r * a, bound) / 4
        slopes.append(0.0 if bound < r * a else -w * r * a / 4)
    assert found.loss.item() == pytest.approx(total, rel=1e-12)
    assert torch.autograd.grad(found.loss, logp)[0].tolist() == pytest.approx(slopes, rel=1e-12)
