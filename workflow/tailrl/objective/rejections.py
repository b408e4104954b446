"""Rejections: which tokens and responses a rule drops, by a statistic of how far two policies are apart there.

A statistic is of a token: (log ratio [T], log-prob of its denominator [T]) → [T], with ratio r = p/q. Definitions as in
verl's `rollout_corr_helper.py` and `core_algos.py` (1dda039b9).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tailrl.config.rejection import LOG_STATISTICS, Rejection
from tailrl.objective import kl_estimates
from tailrl.objective.sequences import limited, sequence_any, sequence_max, sequence_mean, sequence_sum
from tailrl.runtime.errors import StudyError
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


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "tv": tv, "kl": kl}


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
            raise StudyError(f"{name}: must give a number for each of the {len(ratio_T)} tokens, as a tensor")
        return value_T.to(ratio_T.dtype)

    return of_ones_own


REDUCTIONS = {"sum": sequence_sum, "mean": sequence_mean, "max": sequence_max}


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
        raise StudyError(f"correction.reject: when: {rule.when} needs the advantages")
    if rule.when == "negative":
        return (above_X | below_X) & (advantage_X < 0)
    return torch.where(advantage_X > 0, above_X, below_X)


def rejections(
    rule: Rejection,
    delta_T: Tensor,
    moved_T: Tensor,
    sequence_T: Tensor,
    count: int,
    logp_infer_T: Tensor | None,
    advantage_T: Tensor | None,
    log_ratio_limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens, bool [T], and the sequences, bool [N], that a rule drops; k1, k2 and k3 are of limited log-ratios."""
    nothing_N = torch.zeros(count, dtype=torch.bool, device=delta_T.device)
    if logp_infer_T is None and rule.of not in LOG_STATISTICS:
        raise StudyError(f"correction.reject: of: {rule.of} needs the sampler's log-probs")
    ratio_T = {"r_corr": delta_T, "r_ppo": moved_T, "r_rollout": delta_T + moved_T}[rule.ratio]
    if rule.of in LOG_STATISTICS:
        ratio_T = limited(ratio_T, log_ratio_limit)
    logq_T = torch.zeros_like(delta_T) if logp_infer_T is None else logp_infer_T
    value_T = statistic(rule.of)(ratio_T, logq_T + delta_T if rule.ratio == "r_ppo" else logq_T)
    if rule.by == "token":
        return falls(rule, value_T, advantage_T), nothing_N
    # All tokens of a sequence have its advantage.
    advantage_N = None if advantage_T is None else sequence_mean(advantage_T, sequence_T, count)
    falls_N = falls(rule, REDUCTIONS[rule.by](value_T, sequence_T, count), advantage_N)
    some_N = sequence_any(torch.ones_like(value_T), sequence_T, count)
    return torch.zeros_like(value_T, dtype=torch.bool), falls_N & some_N
