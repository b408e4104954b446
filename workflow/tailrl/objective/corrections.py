"""Corrections: stop-gradient weights from the log-ratio of trainer to sampler, one small function each.

    Δ_t = log π_train(y_t|s_t) − log π_infer(y_t|s_t),   Δ_y = Σ_t Δ_t      (π^mp and π'^mp with a pruned vocabulary)
    weights    exp(Δ_y), Theorem 5.3; MIS, masked above C, arXiv 2512.23087; TIS, truncated at C, arXiv 2605.14220
    icepop     a token's weight, masked outside [1/C, C] or [C_min, C], arXiv 2510.18855
    rejection  by a response's mean, sum or max, or by a token's value, of a statistic (`STATISTICS`)
    TRM        two of them: max_t K2 and mean_t K3, arXiv 2512.23075; OPSM: the mean of K1 where A < 0, arXiv 2512.02556
    DPPO       a token's p − q, or its binary KL, on the side that A widens, arXiv 2602.04879
    IPO, KPop  a token's |p − q|, or its binary KL in both directions, on either side
    M2PO       the largest (log r)² until the mean over the update's others is small enough, arXiv 2510.01161
    veto       a token ratio exp(Δ_t) below a limit (1e-4), or above another, discards the response, arXiv 2512.23087

A sampled token outside V_S has trainer probability 0, hence ratio 0: any weight or veto gives its response weight 0,
except beside score centering, where the token alone has weight 0 (`tailrl.objective.centering`).
A rejection can judge the policy's own movement instead, r_ppo; weights and veto always judge the mismatch.

Where a response is dropped, its tokens weigh 0, however large their ratios: a zero wins over an infinity. The weight of
a kept token must be finite. Δ is clamped only where `log_ratio_limit` says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tailrl.config.arm import LIMITED, REMEDIES, Correction
from tailrl.objective.kl_estimates import k1, k3
from tailrl.objective.rejections import rejections
from tailrl.objective.sequences import check_packed, limited, sequence_any, sequence_mean, sequence_sum, times
from tailrl.runtime.errors import ConfigurationError, DataError, NumericalError
from tailrl.runtime.import_path import called, is_import_path
from tailrl.runtime.older_names import accepts_older_names

# --- weights of a sequence: (Δ_T, sequence_T, N, threshold) → weight [N], rejected [N] ----------------

Judged = tuple[Tensor, Tensor]
"""Weights, 0 where rejected, and which are rejected."""


def judge(weight: Tensor, rejected: Tensor) -> Judged:
    """These weights, with 0 where rejected."""
    return weight.masked_fill(rejected, 0.0), rejected


def ratio(delta_T: Tensor, sequence_T: Tensor, count: int, limit: float | None = None) -> Tensor:
    """exp(Δ_y) of each sequence, [N]; with a limit Δ_y is `limited`."""
    return limited(sequence_sum(delta_T, sequence_T, count), limit).exp()


def sequence_is(
    delta_T: Tensor, sequence_T: Tensor, count: int, _: float, *, log_ratio_limit: float | None = None
) -> Judged:
    """w = exp(Δ_y) = π_train^mp(y) / π_infer^mp(y): the weight of Theorem 5.3; unbiased, of unbounded variance."""
    ratio_N = ratio(delta_T, sequence_T, count, log_ratio_limit)
    return judge(ratio_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def sequence_tis(
    delta_T: Tensor,
    sequence_T: Tensor,
    count: int,
    threshold: float,
    lower: float | None = None,
    *,
    log_ratio_limit: float | None = None,
) -> Judged:
    """Truncated: w = min(exp(Δ_y), C); with a lower bound, exp(Δ_y) clamped to [C_min, C]."""
    ratio_N, rejected_N = sequence_is(delta_T, sequence_T, count, threshold, log_ratio_limit=log_ratio_limit)
    return ratio_N.clamp(lower, threshold), rejected_N


def mis(
    delta_T: Tensor,
    sequence_T: Tensor,
    count: int,
    threshold: float,
    lower: float | None = None,
    *,
    log_ratio_limit: float | None = None,
) -> Judged:
    """MIS: w = exp(Δ_y) 1[exp(Δ_y) ≤ C]; the default C = 2 is assumed, since the paper's is unconfirmed.

    With a lower bound, weights below it are 0 too (TRL's `sequence_mask`).
    """
    ratio_N = ratio(delta_T, sequence_T, count, log_ratio_limit)
    return judge(ratio_N, (ratio_N > threshold) | (ratio_N < (lower or 0.0)))


def geometric(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float, lower: float | None = None) -> Judged:
    """1 where the token ratios' geometric mean, exp(mean_t Δ_t), lies within [1/C, C] or [C_min, C], else 0."""
    mean_N = sequence_mean(delta_T, sequence_T, count)
    return judge(torch.ones_like(mean_N), ~_within(mean_N, threshold, lower))


def reject_k1(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """1 where |mean_t K1| ≤ threshold, else 0; K1 = −Δ has either sign."""
    mean_N = sequence_mean(k1(delta_T), sequence_T, count)
    return judge(torch.ones_like(mean_N), mean_N.abs() > threshold)


def reject_k3(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """1 where mean_t K3 ≤ threshold, else 0; K3 = e^Δ − Δ − 1 ≥ 0."""
    mean_N = sequence_mean(k3(delta_T), sequence_T, count)
    return judge(torch.ones_like(mean_N), mean_N > threshold)


def _within(log_ratio: Tensor, threshold: float, lower: float | None) -> Tensor:
    """Where a ratio lies within [1/C, C], or [lower, C]; the bounds themselves count."""
    most = torch.tensor(threshold, dtype=log_ratio.dtype).log()
    least = -most if lower is None else torch.tensor(lower, dtype=log_ratio.dtype).log()
    return (log_ratio >= least) & (log_ratio <= most)


# --- weights of a token: (Δ_T, threshold, lower bound) → weight [T], rejected [T] ----------------------


def token_is(delta_T: Tensor, _: float, __: float | None) -> Judged:
    """w_t = exp(Δ_t), of unbounded variance."""
    return judge(delta_T.exp(), torch.zeros_like(delta_T, dtype=torch.bool))


def token_tis(delta_T: Tensor, threshold: float, lower: float | None) -> Judged:
    """TIS: w_t = min(exp(Δ_t), C); with a lower bound, exp(Δ_t) clamped to [C_min, C]."""
    return judge(delta_T.exp().clamp(lower, threshold), torch.zeros_like(delta_T, dtype=torch.bool))


def token_mask(delta_T: Tensor, threshold: float, lower: float | None) -> Judged:
    """IcePop: w_t = exp(Δ_t) where it lies within [1/C, C], or [C_min, C], else 0."""
    return judge(delta_T.exp(), ~_within(delta_T, threshold, lower))


SEQUENCE_WEIGHTS: dict[str, Callable[..., Judged]] = {
    "is": sequence_is,
    "tis": sequence_tis,
    "mis": mis,
    "geometric": geometric,
    "reject_k1": reject_k1,
    "reject_k3": reject_k3,
}
"""Those of every study; `tailrl.objective.remedies` has the others."""
TOKEN_WEIGHTS: dict[str, Callable[[Tensor, float, float | None], Judged]] = {
    "is": token_is,
    "tis": token_tis,
    "mask": token_mask,
}


def sequence_weight(name: str) -> Callable[..., Judged]:
    """The weight of a sequence by its name: one of `SEQUENCE_WEIGHTS`, a module of `remedies`, or an import path."""
    if is_import_path(name):
        return _of_ones_own(name)
    if name in SEQUENCE_WEIGHTS:
        return SEQUENCE_WEIGHTS[name]
    weigh: Callable[..., Judged] = import_module(f"tailrl.objective.remedies.{name}").weigh
    return weigh


def token_weight(name: str) -> Callable[[Tensor, float, float | None], Judged]:
    """The weight of a token by its name, or by an import path."""
    return _of_ones_own(name) if is_import_path(name) else TOKEN_WEIGHTS[name]


def _of_ones_own(path: str) -> Callable[..., Judged]:
    """A weight by import path: it gives weights, or weights and which of them are rejected, of the right shape."""

    def weigh(delta_T: Tensor, *others: Any) -> Judged:
        found = called(path, delta_T.clone(), *others)
        weight, rejected = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        count = others[1] if isinstance(others[0], Tensor) else len(delta_T)
        if not isinstance(weight, Tensor) or weight.shape != (count,):
            what = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ConfigurationError(f"{path}: must give {count} weights, as a tensor, not {what}")
        if rejected is None:
            rejected = torch.zeros_like(weight, dtype=torch.bool)
        if weight.isnan().any() or (weight < 0).any() or rejected.dtype != torch.bool or rejected.shape != weight.shape:
            raise ConfigurationError(
                f"{path}: weights must be numbers from 0, and what is rejected bool of the same shape"
            )
        return judge(weight, rejected)

    return weigh


@dataclass(frozen=True, slots=True)
class BareWeights:
    """What a correction gives to T tokens in N sequences: see `Weights`."""

    weight_T: Tensor
    sequence_N: Tensor
    rejected_N: Tensor
    masked_T: Tensor
    vetoed_N: Tensor
    truncated_T: Tensor
    ratio_X: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of T tokens in N sequences; float32 or bool, without gradient."""

    weight_T: Tensor  # factor of each token's term in the loss: the token's weight times its sequence's
    sequence_N: Tensor  # its sequence's part of it; 0 where the sequence is dropped
    raw_N: Tensor  # exp(Δ_y) before clipping, rejection or veto; 0 where a token lies outside V_S
    used_N: Tensor  # mean of `weight_T` over a sequence; the sequence's own weight where it has no token
    rejected_N: Tensor  # sequences rejected by a threshold; a weight that underflows in float32 is not a rejection
    masked_T: Tensor  # tokens rejected by a threshold
    vetoed_N: Tensor  # sequences discarded by the veto
    truncated_T: Tensor  # tokens whose weight, or whose sequence's, is truncated
    ratio_X: (
        Tensor  # the weights whose mean `normalise` divides by: of tokens, or of sequences where these are weighted
    )


@accepts_older_names(logp_infer_T="logp_sampler_T")
@torch.no_grad()
def correct(
    delta_T: Tensor,
    outside_T: Tensor,
    sequence_T: Tensor,
    count: int,
    correction: Correction,
    moved_T: Tensor | None = None,
    logp_sampler_T: Tensor | None = None,
    advantage_T: Tensor | None = None,
    segment_T: Tensor | None = None,
) -> Weights:
    """The weights that `correction` gives to the tokens and sequences of a micro-batch.

    They are not normalised: `normaliser` has what the loss of a whole batch is to be divided by.

    Args:
        delta_T: float32 [T], Δ_t = log r_corr; ignored where outside.
        outside_T: bool [T], y_t ∉ V_S.
        sequence_T: int64 [T], each token's sequence.
        count: N; a sequence without a token gets weight 1 (an empty product).
        correction: weights, thresholds and veto of the arm.
        moved_T: float32 [T], log r_ppo = log π_θ − log π_train_old (arXiv 2605.14220); ignored where outside. None: 0,
            as before the first update.
        logp_sampler_T: [T] nats, the sampler's log-probs, which rejections of tv and kl need; None: none do.
        advantage_T: [T], the advantage of the token's sequence, whose sign some rejections need.
        segment_T: int64 [T], each token's segment, which rejections by segment need; None: a sequence is one segment.

    Raises:
        StudyError: not one entry a token, no such sequence, or something that a rejection needs is missing.
        NumericalError: a kept token's weight overflows the dtype (exp(Δ) of `is` at Δ > 88 nats in float32).
    """
    if not isinstance(correction, Correction):
        raise ConfigurationError(f'correction: needs Correction(sequence="mis", ...), not {correction!r}')
    moved_T = torch.zeros_like(delta_T) if moved_T is None else moved_T
    check_packed(count, sequence_T, delta_T=delta_T, outside_T=outside_T, moved_T=moved_T)
    if outside_T.dtype != torch.bool:
        raise DataError(f"outside_T must be bool, not {str(outside_T.dtype).removeprefix('torch.')}")
    outside_N = sequence_any(outside_T, sequence_T, count)
    delta_T, moved_T = (values_T.masked_fill(outside_T, 0.0) for values_T in (delta_T, moved_T))
    raw_N = ratio(delta_T, sequence_T, count).masked_fill(outside_N, 0.0)
    outside = (outside_T, outside_N)
    found = weigh(delta_T, moved_T, sequence_T, count, correction, logp_sampler_T, advantage_T, outside, segment_T)
    tokens_N = sequence_sum(torch.ones_like(delta_T), sequence_T, count)
    used_N = torch.where(tokens_N > 0, sequence_mean(found.weight_T, sequence_T, count), found.sequence_N)
    return Weights(
        found.weight_T, found.sequence_N, raw_N, used_N, found.rejected_N, found.masked_T, found.vetoed_N,
        found.truncated_T, found.ratio_X,
    )  # fmt: skip


def weigh(
    delta_T: Tensor,
    moved_T: Tensor,
    sequence_T: Tensor,
    count: int,
    correction: Correction,
    logp_sampler_T: Tensor | None,
    advantage_T: Tensor | None,
    outside: tuple[Tensor, Tensor] | None = None,
    segment_T: Tensor | None = None,
) -> BareWeights:
    """The weights alone, with no sum over a sequence that they do not need. Its arguments are those of `correct`.

    `outside`: which tokens lie outside V_S, where delta_T and moved_T are 0, and which sequences have one; None: none.
    """
    weighed = _importance(delta_T, moved_T, sequence_T, count, correction)
    (token_T, masked_T), (sequence_N, rejected_N), truncated_T = weighed
    nothing_T, nothing_N = masked_T.new_zeros(len(delta_T)), rejected_N.new_zeros(count)
    outside_T, outside_N = outside or (nothing_T, nothing_N)
    ratio_X = sequence_N.masked_fill(outside_N, 0.0) if correction.token == "none" else token_T * ~outside_T
    for rule in correction.reject:
        judged = (delta_T, moved_T, sequence_T, count, logp_sampler_T, advantage_T, correction.log_ratio_limit)
        falls_T, falls_N = rejections(rule, *judged, segment_T)
        masked_T, rejected_N = masked_T | falls_T, rejected_N | falls_N
    # Score centering knows a token's own chance to be dropped, and not a whole response's.
    alone = correction.centering != "none"
    token_T = token_T.masked_fill(masked_T | outside_T if alone and correction.token != "none" else masked_T, 0.0)
    sequence_N = sequence_N.masked_fill(rejected_N, 0.0)
    vetoed_N = nothing_N
    if correction.vetoes:
        vetoed_N = sequence_any(_vetoes(correction, delta_T) | outside_T, sequence_T, count)
    gone_N = vetoed_N | outside_N if correction.weighted and not alone else vetoed_N
    sequence_N = sequence_N.masked_fill(gone_N, 0.0)
    weight_T = times(token_T, sequence_N[sequence_T])
    if weight_T.isinf().any():
        largest = sequence_sum(delta_T, sequence_T, count).masked_fill(gone_N, -torch.inf).max().item()
        raise NumericalError(_overflow(correction, largest, delta_T.dtype))
    return BareWeights(weight_T, sequence_N, rejected_N, masked_T, vetoed_N, truncated_T, ratio_X)


def normaliser(correction: Correction, ratio_X: Tensor) -> float:
    """What `normalise` divides a batch's weights by: the mean of `Weights.ratio_X` over the batch; else 1.

    As in verl (`compute_rollout_correction_weights`, 1dda039b9), truncated weights count as truncated and masked ones
    as 0; rejections and vetoes do not change the mean; a mean of almost 0 divides nothing.

    Raises:
        NumericalError: the mean is not finite, as where a dropped response's weight overflows: it would divide to 0.
    """
    mean = ratio_X.double().mean().item() if correction.normalise and len(ratio_X) else 1.0
    if not math.isfinite(mean):
        raise NumericalError(f"correction.normalise: the mean weight is {mean}; tis bounds the weights")
    return mean if mean > 1e-8 else 1.0


def _importance(
    delta_T: Tensor, moved_T: Tensor, sequence_T: Tensor, count: int, correction: Correction
) -> tuple[Judged, Judged, Tensor]:
    """The weights of tokens and of sequences by their own thresholds; bool [T], where these truncate."""
    token: Judged = torch.ones_like(delta_T), torch.zeros_like(delta_T, dtype=torch.bool)
    sequence: Judged = delta_T.new_ones(count), token[1].new_zeros(count)
    truncated_T, limit = token[1], correction.log_ratio_limit
    if correction.token != "none":
        own_T = limited(delta_T, limit)
        token = token_weight(correction.token)(own_T, correction.token_threshold, correction.token_lower)
        truncated_T = (token[0] != own_T.exp()) & ~token[1]
    if (name := correction.sequence) != "none":
        judged_T = delta_T if correction.rejects == "r_corr" else moved_T
        weigh = sequence_weight(name)
        lower = () if correction.sequence_lower is None else (correction.sequence_lower,)
        bound = {} if limit is None or name not in LIMITED else {"log_ratio_limit": limit}
        sequence = weigh(judged_T, sequence_T, count, correction.limit, *lower, **bound)
        if name == "tis":
            truncated_T = truncated_T | (sequence[0] != ratio(delta_T, sequence_T, count, limit))[sequence_T]
        elif name in REMEDIES and name.endswith("_tis"):
            free_N = weigh(judged_T, sequence_T, count, math.inf)[0]
            truncated_T = truncated_T | (sequence[0] != free_N)[sequence_T]
    return token, sequence, truncated_T


def _overflow(correction: Correction, largest: float, dtype: torch.dtype) -> str:
    """The sentence on a weight that its dtype cannot hold."""
    if correction.token == "is" and not correction.sequence_ratio:
        return f"correction.token: is: a token's weight is beyond {str(dtype).removeprefix('torch.')}; tis bounds it"
    return (
        f"correction.sequence: {correction.sequence}: a response's weight exp(Δ_y) at Δ_y = {largest:.3g} nats is "
        f"beyond {str(dtype).removeprefix('torch.')}; tis bounds such weights, mis and a veto drop them"
    )


def _vetoes(correction: Correction, delta_T: Tensor) -> Tensor:
    """Tokens whose ratio discards their sequence."""
    found_T = torch.zeros_like(delta_T, dtype=torch.bool)
    if correction.veto is not None:
        found_T |= delta_T < torch.tensor(correction.veto, dtype=delta_T.dtype).log()
    if correction.veto_above is not None:
        found_T |= delta_T > torch.tensor(correction.veto_above, dtype=delta_T.dtype).log()
    return found_T
