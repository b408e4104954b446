"""Losses of a ratio r = π_θ/π_old: PPO's clipped ratio and what replaces it, one small function each.

Each gives a token's term [T], which the loss subtracts, and bool [T], where the clip acts. At r = 1 each term has the
gradient A ∇ log π of the plain policy gradient. Terms add up over tokens as in every loss here; the papers' own means
over tokens differ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrl.objective.sequences import sequence_mean, sequence_sum

Term = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RatioTokens:
    """T tokens of N = `count` sequences, whose ratios are judged."""

    logp_T: Tensor  # log π_θ, with gradient
    ratio_T: Tensor  # log r, with gradient
    advantage_T: Tensor
    sequence_T: Tensor  # int64
    count: int
    clip: tuple[float, float]  # low, high


SAPO_TEMPERATURES = (1.0, 1.05)
"""τ where A > 0, and elsewhere: the defaults of verl and of TRL (arXiv 2511.20347)."""

VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""k and λ where A ≥ 0, and elsewhere: TRL's defaults."""

VESPO_BOUNDS = (math.log(1e-8), 20.0)
"""TRL clamps the log of a response's ratio to these."""


def ppo(t: RatioTokens) -> Term:
    """min(r A, clip(r, 1 − low, 1 + high) A): PPO (arXiv 1707.06347)."""
    return clipped(t.ratio_T.exp(), t.advantage_T, t.clip)


def free(t: RatioTokens) -> Term:
    """r A, which DPPO and IcePop mask in place of a clip."""
    return t.ratio_T.exp() * t.advantage_T, torch.zeros_like(t.advantage_T, dtype=torch.bool)


def gspo(t: RatioTokens) -> Term:
    """PPO's term with s = exp(mean_t log r_t), a response's geometric mean, in place of r (arXiv 2507.18071).

    As in verl's `compute_policy_loss_gspo` each token has the value of s and its own log-prob's gradient, s ∇ log π.
    """
    mean_T = sequence_mean(t.ratio_T.detach(), t.sequence_T, t.count)[t.sequence_T]
    return clipped((mean_T + t.logp_T - t.logp_T.detach()).exp(), t.advantage_T, t.clip)


def cispo(t: RatioTokens) -> Term:
    """sg(clip(r, 1 − low, 1 + high)) A log π: no token loses its gradient (arXiv 2506.13585; verl's `cispo`)."""
    free_T = t.ratio_T.detach().exp()
    weight_T = free_T.clamp(1 - t.clip[0], 1 + t.clip[1])
    return weight_T * t.advantage_T * t.logp_T, weight_T != free_T


def sapo(t: RatioTokens) -> Term:
    """(4/τ) σ(τ (r − 1)) A: a soft gate in place of the clip (arXiv 2511.20347)."""
    tau_T = _by_sign(t.advantage_T, t.advantage_T > 0, *SAPO_TEMPERATURES)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (t.ratio_T.exp() - 1))
    return gate_T * t.advantage_T, torch.zeros_like(t.advantage_T, dtype=torch.bool)


def vespo(t: RatioTokens) -> Term:
    """sg(φ(w)) A log π with w = Π_t r_t and φ(w) = w^k e^{λ (1 − w)}, as TRL's `get_gamma_weights` has it."""
    log_w_T = sequence_sum(t.ratio_T.detach(), t.sequence_T, t.count).clamp(*VESPO_BOUNDS)[t.sequence_T]
    k_T, lambda_T = (
        _by_sign(t.advantage_T, t.advantage_T >= 0, *pair) for pair in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True)
    )
    phi_T = (k_T * log_w_T + lambda_T * (1 - log_w_T.exp())).exp()
    return phi_T * t.advantage_T * t.logp_T, torch.zeros_like(t.advantage_T, dtype=torch.bool)


def _by_sign(advantage_T: Tensor, positive_T: Tensor, value: float, other: float) -> Tensor:
    return torch.full_like(advantage_T, other).masked_fill(positive_T, value)


def clipped(ratio_T: Tensor, advantage_T: Tensor, clip: tuple[float, float]) -> Term:
    """min(r A, clip(r, 1 − low, 1 + high) A), and where the second is less and no gradient flows."""
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1 - clip[0], 1 + clip[1]) * advantage_T
    return torch.minimum(free_T, clipped_T), (clipped_T < free_T).detach()


RATIO_LOSSES: dict[str, Callable[[RatioTokens], Term]] = {
    "ppo": ppo,
    "free": free,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}
OF_RESPONSES = ("gspo", "vespo")
"""Those of a whole response's ratio, which a token outside the safe set makes 0."""
