"""Rejections: which tokens and responses a rule drops, by a statistic of how far two policies are apart there.

A statistic is of a token: (log ratio [T], log-prob of its denominator [T]) → [T], with ratio r = p/q. Definitions as in
verl's `rollout_corr_helper.py` and `core_algos.py` (1dda039b9).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tailrl.config.rejection import LOG_STATISTICS, Rejection
from tailrl.objective import kl_estimates
from tailrl.objective.sequences import limited, sequence_any, sequence_max, sequence_mean, sequence_sum
from tailrl.runtime.errors import ConfigurationError, DataError
from tailrl.runtime.import_path import called, is_import_path


def k1(ratio_T: Tensor, _: Tensor) -> Tensor:
    """K1 = −log r, of either sign."""
    return kl_estimates.k1(ratio_T)


def k2(ratio_T: Tensor, _: Tensor) -> Tensor:
    """K2 = (log r)²/2 ≥ 0."""
    return kl_estimates.k2(ratio_T)


def k3(ratio_T: Tensor, _: Tensor) -> Tensor:
    """K3 = r − log r − 1 ≥ 0."""
    return kl_estimates.k3(ratio_T)


def tv(ratio_T: Tensor, logq_T: Tensor) -> Tensor:
    """p − q, with r = p/q: DPPO's total variation of a token against all others, with its sign (arXiv 2602.04879)."""
    gap_T, whole_T = logq_T.exp() * ratio_T.expm1(), (logq_T + ratio_T).exp() - logq_T.exp()
    # Beyond e^88 the first is 0 × ∞ in float32; elsewhere it is the exacter one.
    return torch.where(gap_T.isfinite(), gap_T, whole_T)


def kl(ratio_T: Tensor, logq_T: Tensor) -> Tensor:
    """KL of (q, 1−q) from (p, 1−p), with the sign of p − q: DPPO's binary KL (arXiv 2602.04879)."""
    p_T, q_T = (x.clamp(max=0).exp() for x in (logq_T + ratio_T, logq_T))
    others_T = torch.special.xlog1py(1 - q_T, -q_T) - torch.special.xlog1py(1 - q_T, -p_T)
    signed_T: Tensor = ratio_T.sign() * (others_T - q_T * ratio_T)
    return signed_T


def abs_tv(ratio_T: Tensor, logq_T: Tensor) -> Tensor:
    """|p − q|: IPO keeps tokens of at most 0.3, whatever the sign of A (PrimeIntellect-ai/prime-rl, pull request 3418).

    OpenRLHF 0.11.2 gates by it too (`is_correction_gating: tv`).
    """
    return tv(ratio_T, logq_T).abs()


def abs_kl(ratio_T: Tensor, logq_T: Tensor) -> Tensor:
    """KL of (q, 1−q) from (p, 1−p): OpenRLHF 0.11.2's `is_correction_gating: binary_kl`."""
    return kl(ratio_T, logq_T).abs()


def kl_both(ratio_T: Tensor, logq_T: Tensor) -> Tensor:
    """The larger of the binary KL and its reverse: KPop keeps tokens of at most 0.1 (areal-project/AReaL, 1405).

    D(q‖p) = q log(q/p) + (1−q) log((1−q)/(1−p)); the reverse swaps p and q.
    """
    return torch.maximum(abs_kl(ratio_T, logq_T), abs_kl(-ratio_T, logq_T + ratio_T))


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "tv": tv,
    "kl": kl,
    "abs_tv": abs_tv,
    "abs_kl": abs_kl,
    "kl_both": kl_both,
}


def statistic(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A token's statistic by its name, or by the import path of a function of (log ratio, log q), [T] each, to [T].

    Raises:
        StudyError: a function by import path gives something else than a number for each token.
    """
    if not is_import_path(name):
        return STATISTICS[name]

    def of_ones_own(ratio_T: Tensor, logq_T: Tensor) -> Tensor:
        value_T = called(name, ratio_T.clone(), logq_T.clone())
        if not isinstance(value_T, Tensor) or value_T.shape != ratio_T.shape or value_T.isnan().any():
            raise ConfigurationError(f"{name}: must give a number for each of the {len(ratio_T)} tokens, as a tensor")
        return value_T.to(ratio_T.dtype)

    return of_ones_own


REDUCTIONS = {"sum": sequence_sum, "mean": sequence_mean, "max": sequence_max}


def largest_kept(value_T: Tensor, limit: float, share_T: Tensor | None = None) -> float:
    """The value up to which tokens are kept, so that their mean is at most `limit`; the smallest one is kept always.

    Infinite where all are kept: a later update moves values beyond the largest one, and nothing was to be dropped.
    M2PO with k2 and half its limit of (log r)² (arXiv 2510.01161; AReaL 1.0.4, `_get_m2po_loss_mask`): the largest
    values are dropped one by one until the mean of the others is small enough. Tokens of equal value stay together.

    Args:
        value_T: [T], none negative.
        limit: of the mean.
        share_T: [T], how often each value occurs; None: once.
    """
    sorted_T, order_T = value_T.double().sort()
    count_T = torch.ones_like(sorted_T) if share_T is None else share_T.double()[order_T]
    mean_T = (count_T * sorted_T).cumsum(0) / count_T.cumsum(0)
    fitting = int((mean_T <= limit).sum().item())  # means of sorted values never fall
    return math.inf if fitting == len(sorted_T) else sorted_T[max(fitting, 1) - 1].item()


def falls(rule: Rejection, value_X: Tensor, advantage_X: Tensor | None) -> Tensor:
    """Which values the rule drops: bool, of tokens or of sequences.

    Raises:
        StudyError: the rule asks for the advantage's sign, and none is given.
    """
    nothing_X = torch.zeros_like(value_X, dtype=torch.bool)
    above_X = nothing_X if rule.above is None else value_X > torch.tensor(rule.above, dtype=value_X.dtype)
    below_X = nothing_X if rule.below is None else value_X < torch.tensor(rule.below, dtype=value_X.dtype)
    if rule.when == "always":
        return above_X | below_X
    if advantage_X is None:
        raise DataError(f"correction.reject: when: {rule.when} needs the advantages")
    if rule.when == "negative":
        return (above_X | below_X) & (advantage_X < 0)
    return torch.where(advantage_X > 0, above_X, below_X)


def rule_values(
    rule: Rejection, delta_T: Tensor, moved_T: Tensor, logp_infer_T: Tensor | None, log_ratio_limit: float | None = None
) -> Tensor:
    """The statistic that a rule judges, of each token, [T].

    Raises:
        StudyError: the statistic needs the sampler's log-probs, and none are given.
    """
    if logp_infer_T is None and rule.of not in LOG_STATISTICS:
        raise DataError(f"correction.reject: of: {rule.of} needs the sampler's log-probs")
    ratio_T = {"r_corr": delta_T, "r_ppo": moved_T, "r_rollout": delta_T + moved_T}[rule.ratio]
    if rule.of in LOG_STATISTICS:
        ratio_T = limited(ratio_T, log_ratio_limit)
    logq_T = torch.zeros_like(delta_T) if logp_infer_T is None else logp_infer_T
    return statistic(rule.of)(ratio_T, logq_T + delta_T if rule.ratio == "r_ppo" else logq_T)


def rejections(
    rule: Rejection,
    delta_T: Tensor,
    moved_T: Tensor,
    sequence_T: Tensor,
    count: int,
    logp_infer_T: Tensor | None,
    advantage_T: Tensor | None,
    log_ratio_limit: float | None = None,
    segment_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens, bool [T], and the sequences, bool [N], that a rule drops.

    Statistics of the log-ratio alone are of limited ones. `segment_T`: int64 [T], a number for each segment of the
    micro-batch; None: each response is one. A rule `by: batch` takes these tokens for the update's: training resolves
    it before (`tailrl.objective.batch_rules`).
    """
    nothing_N = torch.zeros(count, dtype=torch.bool, device=delta_T.device)
    value_T = rule_values(rule, delta_T, moved_T, logp_infer_T, log_ratio_limit)
    if rule.by == "token":
        return falls(rule, value_T, advantage_T), nothing_N
    if rule.by == "batch":
        return value_T > largest_kept(value_T, rule.above or 0.0), nothing_N
    if rule.by == "segment":
        segment_T = sequence_T if segment_T is None else segment_T
        count = int(segment_T.max().item()) + 1 if len(segment_T) else 0
        return falls(rule, sequence_mean(value_T, segment_T, count)[segment_T], advantage_T), nothing_N
    # All tokens of a sequence have its advantage.
    advantage_N = None if advantage_T is None else sequence_mean(advantage_T, sequence_T, count)
    falls_N = falls(rule, REDUCTIONS[rule.by](value_T, sequence_T, count), advantage_N)
    some_N = sequence_any(torch.ones_like(value_T), sequence_T, count)
    return torch.zeros_like(value_T, dtype=torch.bool), falls_N & some_N
