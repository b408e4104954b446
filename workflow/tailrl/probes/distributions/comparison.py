"""Compares two distributions over one vocabulary, state by state, in float64.

Δ_a = log π_train(a) − log π_infer(a) of token a. Nothing here depends on a shift of either side's logits, and equal
logits give exact zeros. Both divergences sum nonnegative terms, so that rounding does not hide engines that nearly
agree (1e-14 nats).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrl.artifacts.probes import Positions
from tailrl.config.distributions import HEAD_BELOW, TAIL_FROM
from tailrl.objective.kl_estimates import k3
from tailrl.objective.safe_set import safe_set

EDGES = (0.0, 0.1, 0.5, *map(float, range(1, 15)), 16.0, 18.0, 20.0, float("inf"))
"""Edges of the bins of −ln π_train, nats."""

SCALED_BINS = 41
"""Bins of −Δ / ε_max, which lies in [−2, 2]; an odd number, so that 0 is in the middle of a bin."""


def compare(
    logits_trainer_PV: Tensor, logits_sampler_PV: Tensor, tokens_P: Tensor, log_rhos: Sequence[float]
) -> Positions:
    """The comparison of two sets of logits.

    Args:
        logits_trainer_PV: float [P, V], finite, after temperature and disturbance.
        logits_sampler_PV: likewise.
        tokens_P: int64, the sampled tokens.
        log_rhos: ln ρ of S min-p sets, which each side chooses from its own logits.
    """
    trainer_PV, sampler_PV = logits_trainer_PV.double().log_softmax(-1), logits_sampler_PV.double().log_softmax(-1)
    delta_PV, mass_PV = trainer_PV - sampler_PV, sampler_PV.exp()
    trainer_set_PSV, sampler_set_PSV = (
        torch.stack([safe_set(logits_PV, "min_p", log_rho) for log_rho in log_rhos], 1)
        for logits_PV in (logits_trainer_PV, logits_sampler_PV)
    )
    log_kept_trainer_PS, log_kept_sampler_PS = (
        _log_mass(trainer_PV, trainer_set_PSV),
        _log_mass(sampler_PV, sampler_set_PSV),
    )
    both_PSV = trainer_set_PSV & sampler_set_PSV
    found = (
        trainer_PV.gather(-1, tokens_P[:, None])[:, 0],
        sampler_PV.gather(-1, tokens_P[:, None])[:, 0],
        (trainer_PV.exp() - mass_PV).abs().sum(-1) / 2,
        _excess(trainer_PV, sampler_PV).sum(-1),
        _excess(sampler_PV, trainer_PV).sum(-1),
        delta_PV.abs().amax(-1),
        (delta_PV.amax(-1) - delta_PV.amin(-1)) / 2,
        torch.special.entr(trainer_PV.exp()).sum(-1),
        torch.special.entr(mass_PV).sum(-1),
        logits_trainer_PV.argmax(-1) != logits_sampler_PV.argmax(-1),
        trainer_set_PSV.sum(-1, dtype=torch.int32),
        sampler_set_PSV.sum(-1, dtype=torch.int32),
        both_PSV.sum(-1, dtype=torch.int32),
        log_kept_trainer_PS,
        log_kept_sampler_PS,
        mass_PV[:, None].masked_fill(trainer_set_PSV, 0.0).sum(-1),
        _masked_k3(trainer_PV, sampler_PV, log_kept_trainer_PS, log_kept_sampler_PS, both_PSV),
        *_by_probability(trainer_PV, delta_PV, mass_PV),
        *_histograms(trainer_PV, delta_PV, mass_PV),
    )
    return Positions(*(values.cpu().numpy() for values in found))


def _excess(p_PV: Tensor, q_PV: Tensor) -> Tensor:
    """Terms of KL(p ‖ q) of log-probs, [P, V]: p (e^d − 1 − d) with d = ln q − ln p, since Σ p (e^d − 1) is 0."""
    d_PV, mass_PV = q_PV - p_PV, p_PV.exp()
    # If q is much larger, e^d would overflow; if it is not, q − p would cancel.
    return torch.where(d_PV < 1, mass_PV * k3(d_PV.clamp(max=1)), q_PV.exp() - mass_PV * (1 + d_PV))


def _masked_k3(
    trainer_PV: Tensor, sampler_PV: Tensor, log_kept_trainer_PS: Tensor, log_kept_sampler_PS: Tensor, both_PSV: Tensor
) -> Tensor:
    """Expected k3 of a token sampled from V'_S, over the tokens in V_S too, [P, S]."""
    found_SP = []
    for trainer_P, sampler_P, both_PV in zip(
        log_kept_trainer_PS.T, log_kept_sampler_PS.T, both_PSV.unbind(1), strict=True
    ):
        # One set at a time: all at once would take S times the memory of the other fields.
        excess_PV = _excess(sampler_PV - sampler_P[:, None], trainer_PV - trainer_P[:, None])
        found_SP.append(excess_PV.masked_fill(~both_PV, 0.0).sum(-1))
    return torch.stack(found_SP, -1)


def _log_mass(log_probs_PV: Tensor, safe_PSV: Tensor) -> Tensor:
    """ln of the mass of each safe set, [P, S]; exactly 0 if all tokens are safe."""
    kept_PS = log_probs_PV[:, None].masked_fill(~safe_PSV, -torch.inf).logsumexp(-1)
    return torch.where(safe_PSV.all(-1), 0.0, kept_PS)


def _by_probability(trainer_PV: Tensor, delta_PV: Tensor, mass_PV: Tensor) -> tuple[Tensor, ...]:
    inner = torch.tensor(EDGES[1:-1], dtype=trainer_PV.dtype, device=trainer_PV.device)
    bin_PV = torch.bucketize(-trainer_PV, inner, right=True)
    empty_PB = trainer_PV.new_zeros(len(trainer_PV), len(EDGES) - 1)
    factors = 1.0, delta_PV.abs(), -delta_PV, *_predictions(trainer_PV.exp(), mass_PV, delta_PV)
    return tuple(empty_PB.scatter_add(-1, bin_PV, mass_PV * factor) for factor in factors)


def _predictions(p_PV: Tensor, q_PV: Tensor, delta_PV: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of −Δ_a of a token a sampled from q, if the logits differ by iid N(0, σ²): both nats, [P, V].

    σ² is the variance of Δ over all tokens, each counted once. First: σ² [(1 − p_a)(1 − q_a) + Σ_{k≠a} p_k q_k] by
    Prop. 4.3 of arXiv 2512.23087. Second: σ² [½ − 2 p_a + (3/2) Σ_k p_k²], the expansion of E[−Δ_a | a sampled] to
    second order in σ, which holds for the mode too.
    """
    variance_P1 = (delta_PV - delta_PV.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    both_PV = p_PV * q_PV
    paper_PV = (1 - p_PV) * (1 - q_PV) + both_PV.sum(-1, keepdim=True) - both_PV
    second_PV = 0.5 - 2 * p_PV + 1.5 * p_PV.square().sum(-1, keepdim=True)
    return variance_P1 * paper_PV, variance_P1 * second_PV


def _histograms(trainer_PV: Tensor, delta_PV: Tensor, mass_PV: Tensor) -> tuple[Tensor, Tensor]:
    half_range_P1 = (delta_PV.amax(-1, keepdim=True) - delta_PV.amin(-1, keepdim=True)) / 2
    scaled_PV = torch.where(half_range_P1 > 0, -delta_PV / half_range_P1, 0.0)
    bin_PV = ((scaled_PV + 2) / 4 * SCALED_BINS).long().clamp(0, SCALED_BINS - 1)
    empty_PH = trainer_PV.new_zeros(len(trainer_PV), SCALED_BINS)
    head_PH, tail_PH = (
        empty_PH.scatter_add(-1, bin_PV, torch.where(group_PV & (half_range_P1 > 0), mass_PV, 0.0))
        for group_PV in (-trainer_PV < HEAD_BELOW, -trainer_PV >= TAIL_FROM)
    )
    return head_PH, tail_PH
