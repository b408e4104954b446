"""Corrections: stop-gradient weights from the log-ratio of trainer to sampler, one small function each.

    Δ_t = log π_train(y_t|s_t) − log π_infer(y_t|s_t),   Δ_y = Σ_t Δ_t      (π^mp and π'^mp with a pruned vocabulary)
    weights    exp(Δ_y), Theorem 5.3; MIS, masked above C, arXiv 2512.23087; TIS, truncated at C, arXiv 2605.14220
    rejection  by a response's mean of K1 = −Δ or K3 = e^Δ − Δ − 1, arXiv 2605.14220
    veto       a token ratio exp(Δ_t) below a limit (1e-4) discards the whole response, arXiv 2512.23087

A sampled token outside V_S has trainer probability 0, hence ratio 0: any weight or veto gives its response weight 0.
A rejection can judge the policy's own movement instead, r_ppo; weights and veto always judge the mismatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.runtime.errors import StudyError


def check_logprobs(logp_T: Tensor) -> None:
    """Raises StudyError where a log-prob is above 0 by more than rounding: a probability, or a logit."""
    if (logp_T > 0.01).any():
        raise StudyError(f"log-probs are at most 0, and one is {logp_T.max().item():.3g}: are these probabilities?")


def check_packed(count: int, sequence_T: Tensor, **others: Tensor) -> None:
    """Raises StudyError where tensors do not have one entry a token, or tokens belong to none of `count` sequences."""
    if sequence_T.dim() != 1 or any(other.shape != sequence_T.shape for other in others.values()):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in {"sequence_T": sequence_T, **others}.items())
        raise StudyError(f"one entry a token is needed, [T], not {shapes}: of a padded batch take x[mask]")
    if sequence_T.dtype not in (torch.int64, torch.int32) or ((sequence_T < 0) | (sequence_T >= count)).any():
        raise StudyError(f"sequence_T must hold each token's sequence, whole numbers from 0 to {count - 1}")


def sequence_sum(values_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Sums of per-token values [T] over N = `count` sequences: [N]."""
    return torch.zeros(count, dtype=values_T.dtype, device=values_T.device).index_add(0, sequence_T, values_T)


def sequence_mean(values_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Means of per-token values [T] over N = `count` sequences: [N]; 0 for a sequence without a token."""
    tokens_N = sequence_sum(torch.ones_like(values_T), sequence_T, count)
    return sequence_sum(values_T, sequence_T, count) / tokens_N.clamp(min=1)


def sequence_any(flags_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Whether any token of a sequence carries the flag: bool [N]."""
    return sequence_sum(flags_T.float(), sequence_T, count) > 0


# --- weights of a sequence: (Δ_T, sequence_T, N, threshold) → weight [N], rejected [N] ----------------

Judged = tuple[Tensor, Tensor]
"""Weights, 0 where rejected, and which are rejected."""


def judge(weight: Tensor, rejected: Tensor) -> Judged:
    """These weights, with 0 where rejected."""
    return weight.masked_fill(rejected, 0.0), rejected


def ratio(delta_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """exp(Δ_y) of each sequence, [N]."""
    return sequence_sum(delta_T, sequence_T, count).exp()


def sequence_is(delta_T: Tensor, sequence_T: Tensor, count: int, _: float) -> Judged:
    """w = exp(Δ_y) = π_train^mp(y) / π_infer^mp(y): the weight of Theorem 5.3; unbiased, of unbounded variance."""
    ratio_N = ratio(delta_T, sequence_T, count)
    return judge(ratio_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def sequence_tis(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """Truncated: w = min(exp(Δ_y), C)."""
    ratio_N, rejected_N = sequence_is(delta_T, sequence_T, count, threshold)
    return ratio_N.clamp(max=threshold), rejected_N


def mis(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """MIS: w = exp(Δ_y) 1[exp(Δ_y) ≤ C]; the default C = 2 is assumed, since the paper's is unconfirmed."""
    ratio_N = ratio(delta_T, sequence_T, count)
    return judge(ratio_N, ratio_N > threshold)


def geometric(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """1 where the token ratios' geometric mean, exp(mean_t Δ_t), lies within [1/C, C], else 0."""
    mean_N = sequence_mean(delta_T, sequence_T, count)
    return judge(torch.ones_like(mean_N), mean_N.abs() > torch.tensor(threshold).log())


def reject_k1(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """1 where |mean_t K1| ≤ threshold, else 0; K1 = −Δ has either sign."""
    mean_N = sequence_mean(-delta_T, sequence_T, count)
    return judge(torch.ones_like(mean_N), mean_N.abs() > threshold)


def reject_k3(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """1 where mean_t K3 ≤ threshold, else 0; K3 = e^Δ − Δ − 1 ≥ 0."""
    mean_N = sequence_mean(delta_T.expm1() - delta_T, sequence_T, count)
    return judge(torch.ones_like(mean_N), mean_N > threshold)


# --- weights of a token: (Δ_T, threshold) → weight [T], rejected [T] ----------------------------------


def token_tis(delta_T: Tensor, threshold: float) -> Judged:
    """TIS: w_t = min(exp(Δ_t), C)."""
    return judge(delta_T.exp().clamp(max=threshold), torch.zeros_like(delta_T, dtype=torch.bool))


def token_mask(delta_T: Tensor, threshold: float) -> Judged:
    """w_t = exp(Δ_t) where it lies within [1/C, C], else 0."""
    return judge(delta_T.exp(), delta_T.abs() > torch.tensor(threshold).log())


SEQUENCE_WEIGHTS: dict[str, Callable[[Tensor, Tensor, int, float], Judged]] = {
    "is": sequence_is,
    "tis": sequence_tis,
    "mis": mis,
    "geometric": geometric,
    "reject_k1": reject_k1,
    "reject_k3": reject_k3,
}
"""Those of every study; `tailrl.objective.remedies` has the others."""
TOKEN_WEIGHTS: dict[str, Callable[[Tensor, float], Judged]] = {"tis": token_tis, "mask": token_mask}


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of T tokens in N sequences; float32 or bool, without gradient."""

    weight_T: Tensor  # factor of each token's term in the loss: the token's weight times its sequence's
    raw_N: Tensor  # exp(Δ_y) before clipping, rejection or veto; 0 where a token lies outside V_S
    used_N: Tensor  # mean of `weight_T` over a sequence; the sequence's own weight where it has no token
    rejected_N: Tensor  # sequences rejected by the threshold; a weight that underflows in float32 is not a rejection
    masked_T: Tensor  # tokens rejected by the threshold
    vetoed_N: Tensor  # sequences discarded by the veto


@torch.no_grad()
def correct(
    delta_T: Tensor,
    outside_T: Tensor,
    sequence_T: Tensor,
    count: int,
    correction: Correction,
    moved_T: Tensor | None = None,
) -> Weights:
    """The weights that `correction` gives to the tokens and sequences of a micro-batch.

    Args:
        delta_T: float32 [T], Δ_t = log r_corr; ignored where outside.
        outside_T: bool [T], y_t ∉ V_S.
        sequence_T: int64 [T], each token's sequence.
        count: N; a sequence without a token gets weight 1 (an empty product).
        correction: weights, thresholds and veto of the arm.
        moved_T: float32 [T], log r_ppo = log π_θ − log π_train_old (arXiv 2605.14220); ignored where outside. None: 0,
            as before the first update.

    Raises:
        StudyError: not one entry a token, no such sequence, or a sequence's weight overflows the dtype (exp(Δ_y) of
            `is` at Δ_y > 88 nats).
    """
    if not isinstance(correction, Correction):
        raise StudyError(f'correction: needs Correction(sequence="mis", ...), not {correction!r}')
    moved_T = torch.zeros_like(delta_T) if moved_T is None else moved_T
    check_packed(count, sequence_T, delta_T=delta_T, outside_T=outside_T, moved_T=moved_T)
    if outside_T.dtype != torch.bool:
        raise StudyError(f"outside_T must be bool, not {str(outside_T.dtype).removeprefix('torch.')}")
    outside_N = sequence_any(outside_T, sequence_T, count)
    delta_T = delta_T.masked_fill(outside_T, 0.0)
    raw_N = ratio(delta_T, sequence_T, count).masked_fill(outside_N, 0.0)
    token_T, sequence_N = torch.ones_like(delta_T), torch.ones_like(raw_N)
    masked_T, rejected_N, vetoed_N = map(torch.zeros_like, (outside_T, outside_N, outside_N))
    if correction.token != "none":
        token_T, masked_T = TOKEN_WEIGHTS[correction.token](delta_T, correction.token_threshold)
    if correction.sequence != "none":
        judged_T = delta_T if correction.rejects == "r_corr" else moved_T.masked_fill(outside_T, 0.0)
        name = correction.sequence
        weigh = SEQUENCE_WEIGHTS.get(name) or import_module(f"tailrl.objective.remedies.{name}").weigh
        sequence_N, rejected_N = weigh(judged_T, sequence_T, count, correction.limit)
    if correction.veto is not None:
        vetoed_N = sequence_any((delta_T < torch.tensor(correction.veto).log()) | outside_T, sequence_T, count)
    gone_N = vetoed_N | outside_N if correction.weighted else vetoed_N
    sequence_N = sequence_N.masked_fill(gone_N, 0.0)
    weight_T = token_T * sequence_N[sequence_T]
    if sequence_N.isinf().any() or weight_T.isinf().any():
        largest = sequence_sum(delta_T, sequence_T, count).masked_fill(gone_N, -torch.inf).max().item()
        raise StudyError(
            f"correction.sequence: {correction.sequence}: a response's weight exp(Δ_y) at Δ_y = {largest:.3g} nats is "
            f"beyond {str(delta_T.dtype).removeprefix('torch.')}; tis bounds such weights, mis and a veto drop them"
        )
    tokens_N = sequence_sum(torch.ones_like(token_T), sequence_T, count)
    used_N = torch.where(tokens_N > 0, sequence_mean(weight_T, sequence_T, count), sequence_N)
    return Weights(weight_T, raw_N, used_N, rejected_N, masked_T, vetoed_N)
