"""Losses of a ratio r = π_θ/π_old: PPO's clipped ratio and what replaces it, one small function each.

Each gives a token's term [T], which the loss subtracts, and bool [T], where the clip acts. At r = 1 each term has the
gradient A ∇ log π of the plain policy gradient. Terms add up over tokens as in every loss here; the papers' own means
over tokens differ.

A ratio beyond e^88 is infinite in float32, and 0 × ∞ would be NaN. So a token's gradient is exactly 0 where the clip
acts, where its weight or advantage is 0, and where SAPO's gate is saturated. The terms of `ppo` and `gspo` with A < 0,
and of `free`, have no bound: they are infinite then, and the loss is refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrl.objective.sequences import limited, sequence_mean, sequence_sum
from tailrl.runtime.errors import ConfigurationError
from tailrl.runtime.import_path import called, is_import_path

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
    limit: float | None = None  # log-ratios are clamped to ± this, in nats, as some frameworks do; None: not clamped
    live_T: Tensor | None = None  # bool, neither weight nor advantage is 0; None: where the advantage is not
    dual: float | None = None  # bound of r where A < 0; of `ppo` alone


SAPO_TEMPERATURES = (1.0, 1.05)
"""τ where A > 0, and elsewhere: the defaults of verl and of TRL (arXiv 2511.20347)."""

VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""k and λ where A ≥ 0, and elsewhere: TRL's defaults."""

VESPO_BOUNDS = (math.log(1e-8), 20.0)
"""TRL clamps the log of a response's ratio to these."""

SATURATED = 80.0  # nats; the gradient of SAPO's sigmoid is exactly 0 from ln 38 on, in float64 too


def ppo(t: RatioTokens) -> Term:
    """min(r A, clip(r, 1 − low, 1 + high) A): PPO (arXiv 1707.06347); with `dual`, at least dual A where A < 0."""
    ratio_T = limited(t.ratio_T, t.limit)
    if t.dual is None:
        return _clipped(ratio_T, t)
    # Dual-clip PPO (arXiv 1912.09729): where A < 0 the term has no other bound as r grows.
    bounded_T = (t.advantage_T < 0) & (ratio_T.detach() > math.log(t.dual))
    term_T, acts_T = _clipped(torch.where(bounded_T, math.log(t.dual), ratio_T), t)
    return term_T, acts_T | bounded_T


def free(t: RatioTokens) -> Term:
    """r A, which DPPO and IcePop mask in place of a clip."""
    nowhere_T = torch.zeros_like(t.advantage_T, dtype=torch.bool)
    return _ratio(limited(t.ratio_T, t.limit), t, nowhere_T) * t.advantage_T, nowhere_T


def gspo(t: RatioTokens) -> Term:
    """PPO's term with s = exp(mean_t log r_t), a response's geometric mean, in place of r (arXiv 2507.18071).

    As in verl's `compute_policy_loss_gspo` each token has the value of s and its own log-prob's gradient, s ∇ log π.
    There log s has a limit from above alone.
    """
    mean_T = sequence_mean(t.ratio_T.detach(), t.sequence_T, t.count)[t.sequence_T]
    log_T = mean_T + t.logp_T - t.logp_T.detach()
    return _clipped(log_T if t.limit is None else log_T.clamp(max=t.limit), t)


def cispo(t: RatioTokens) -> Term:
    """sg(clip(r, 1 − low, 1 + high)) A log π: no token loses its gradient (arXiv 2506.13585; verl's `cispo`)."""
    free_T = t.ratio_T.detach().exp()
    weight_T = free_T.clamp(1 - t.clip[0], 1 + t.clip[1])
    return weight_T * t.advantage_T * t.logp_T, weight_T != free_T


def sapo(t: RatioTokens) -> Term:
    """(4/τ) σ(τ (r − 1)) A: a soft gate in place of the clip (arXiv 2511.20347)."""
    tau_T = _by_sign(t.advantage_T, t.advantage_T > 0, *SAPO_TEMPERATURES)
    ratio_T = limited(t.ratio_T, t.limit).clamp(max=SATURATED).exp()
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    return gate_T * t.advantage_T, torch.zeros_like(t.advantage_T, dtype=torch.bool)


def vespo(t: RatioTokens) -> Term:
    """sg(φ(w)) A log π with w = Π_t r_t and φ(w) = w^k e^{λ (1 − w)}, as TRL's `get_gamma_weights` has it."""
    ratio_T = limited(t.ratio_T.detach(), t.limit)
    log_w_T = sequence_sum(ratio_T, t.sequence_T, t.count).clamp(*VESPO_BOUNDS)[t.sequence_T]
    k_T, lambda_T = (
        _by_sign(t.advantage_T, t.advantage_T >= 0, *pair) for pair in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True)
    )
    phi_T = (k_T * log_w_T + lambda_T * (1 - log_w_T.exp())).exp()
    return phi_T * t.advantage_T * t.logp_T, torch.zeros_like(t.advantage_T, dtype=torch.bool)


def _by_sign(advantage_T: Tensor, positive_T: Tensor, value: float, other: float) -> Tensor:
    return torch.full_like(advantage_T, other).masked_fill(positive_T, value)


def _ratio(log_T: Tensor, t: RatioTokens, fixed_T: Tensor) -> Tensor:
    """e^log, with gradient; 1 without one where the term is fixed or does not count, so that no overflow meets a 0."""
    live_T = t.advantage_T != 0 if t.live_T is None else t.live_T
    return torch.where(live_T & ~fixed_T, log_T, 0.0).exp()


def _clipped(log_T: Tensor, t: RatioTokens) -> Term:
    """min(r A, clip(r, 1 − low, 1 + high) A), and where the second is less and no gradient flows."""
    free_T = log_T.detach().exp()
    bound_T = free_T.clamp(1 - t.clip[0], 1 + t.clip[1]) * t.advantage_T
    acts_T = bound_T < free_T * t.advantage_T
    return torch.where(acts_T, bound_T, _ratio(log_T, t, acts_T) * t.advantage_T), acts_T


RATIO_LOSSES: dict[str, Callable[[RatioTokens], Term]] = {
    "ppo": ppo,
    "free": free,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}


def ratio_term(loss: str, tokens: RatioTokens) -> Term:
    """The term of a loss by its name, or by the import path of a function of `RatioTokens`.

    Raises:
        StudyError: a function by import path gives something else than a term and bool, where the clip acts, for each
            token.
    """
    if not is_import_path(loss):
        return RATIO_LOSSES[loss](tokens)
    found = called(loss, tokens)
    term_T, acts_T = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if acts_T is None:
        acts_T = torch.zeros_like(tokens.advantage_T, dtype=torch.bool)
    for part_T, dtype in ((term_T, tokens.logp_T.dtype), (acts_T, torch.bool)):
        if not isinstance(part_T, Tensor) or part_T.shape != tokens.logp_T.shape or part_T.dtype != dtype:
            raise ConfigurationError(
                f"{loss}: must give a term for each of the {len(tokens.logp_T)} tokens, as a tensor"
            )
    return term_T, acts_T


OF_RESPONSES = ("gspo", "vespo")
"""Those of a whole response's ratio, which a token outside the safe set makes 0."""
