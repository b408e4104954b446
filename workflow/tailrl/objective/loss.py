"""The loss of an arm on packed tokens: log π^mp, advantages and weights become one scalar.

    ĝ = E_{y ~ π_infer^mp}[ (π_train^mp(y) / π_infer^mp(y)) ∇ log π_train^mp(y) A ]                    (Theorem 5.3)

The advantage A stands for the paper's reward R. Training and the probe of exact gradients (`tailrl.probes.gradients`)
call the same `surrogate`. Each loss is a sum over tokens divided by all sequences of the step, rejected ones included:
the losses of a step's micro-batches add up to one mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrl.config.arm import Clip, Correction
from tailrl.objective.corrections import Weights, correct
from tailrl.objective.proximal import proximal_logprobs
from tailrl.objective.ratio_losses import OF_RESPONSES, RatioTokens, ratio_term
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.objective.sequences import check_logprobs, check_packed, sequence_any, times
from tailrl.runtime.errors import NumericalError, StudyError


def policy_gradient(logp_T: Tensor, advantage_T: Tensor, weight_T: Tensor, step_sequences: int) -> Tensor:
    """−(1/B) Σ_t w_t A_t log π^mp(y_t|s_t), a scalar with gradient −ĝ of Theorem 5.3 (with w = 1: naive).

    Args:
        logp_T: float32 [T] with gradient; 0 for a dropped token.
        advantage_T: float32 [T], the advantage of the token's sequence.
        weight_T: float32 [T], stop-gradient.
        step_sequences: B, all sequences sampled in the step.
    """
    return -(weight_T.detach() * advantage_T * logp_T).sum() / step_sequences


def ratio_loss(
    loss: str,
    logp_T: Tensor,
    logp_old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    clip: tuple[float, float],
    step_sequences: int,
    log_ratio_limit: float | None = None,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−(1/B) Σ_t w_t term_t, with the terms of one of `RATIO_LOSSES` on the ratio r = π_θ/π_old.

    At r = 1 it has the gradient of `policy_gradient`.

    Args:
        loss: key of `RATIO_LOSSES`, or an import path.
        logp_T: float32 [T] with gradient.
        logp_old_T: float32 [T], log π_old, stop-gradient. recompute, decoupled: the trainer's before the first update
            on these rollouts, r = r_train. bypass: the sampler's, r = r_rollout (arXiv 2605.14220).
        advantage_T: float32 [T].
        weight_T: float32 [T], stop-gradient; decoupled: times r_corr = π_train_old/π_rollout_old.
        sequence_T: int64 [T], each token's sequence.
        sequences: N.
        clip: (low, high).
        step_sequences: B.
        log_ratio_limit: nats, to which log r is clamped; None: it is not.
        dual: bound of r where A < 0, of `ppo` alone; None: no bound.

    Returns:
        A scalar with gradient, and bool [T]: where the clip acts. The scalar is infinite where a term that counts is.
    """
    # A weight may be infinite where the advantage is 0, and then counts nothing.
    live_T = (weight_T != 0) & (advantage_T != 0)
    weight_T = weight_T.detach().masked_fill(~live_T, 0.0)
    ratio_T = logp_T - logp_old_T.detach()
    tokens = RatioTokens(logp_T, ratio_T, advantage_T, sequence_T, sequences, clip, log_ratio_limit, live_T, dual)
    term_T, clipped_T = ratio_term(loss, tokens)
    return -(weight_T * term_T).sum() / step_sequences, clipped_T


def log_ratio_term(
    correction: Correction, logp_T: Tensor, logp_infer_T: Tensor, outside_T: Tensor, step_sequences: int
) -> Tensor:
    """(1/B) c Σ_t (log π_θ − log π_infer)², a scalar with gradient: IPO's term, on dropped tokens too.

    As `ipo_loss_fn` of PrimeIntellect-ai/prime-rl (559b44772) has it, and Kimi K2.5 (arXiv 2602.02276). A token outside
    the trainer's set has no ratio, and adds nothing.
    """
    if correction.log_ratio_penalty is None:
        return logp_T.new_zeros(())
    log_ratio_T = (logp_T - logp_infer_T).masked_fill(outside_T, 0.0)
    return correction.log_ratio_penalty * log_ratio_T.square().sum() / step_sequences


def check_loss(loss: Tensor) -> None:
    """Raises NumericalError where a loss is not finite, although the log-probs are."""
    if not loss.isfinite():
        raise NumericalError(f"the loss is {loss.item()}: the log-probs are finite, but a ratio or an advantage is not")


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss (a scalar with gradient), its weights, and bool [T]: where the clipped branch is taken."""

    loss: Tensor
    weights: Weights
    clipped_T: Tensor


def surrogate(
    logprobs: TokenLogprobs,
    logp_infer_T: Tensor,
    advantage_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    step_sequences: int,
    correction: Correction,
    clip: Clip | None,
    logp_old_T: Tensor | None = None,
    expected_T: Tensor | None = None,
    segment_T: Tensor | None = None,
    age_T: Tensor | None = None,
) -> Surrogate:
    """One micro-batch's share of the step's loss: Δ, then weights, then `policy_gradient` or `ratio_loss`.

    Args:
        logprobs: the trainer's.
        logp_infer_T: [T] nats, the sampler's log π'^mp of the same tokens.
        advantage_T: [T], the advantage of the token's sequence.
        sequence_T: int64 [T], each token's sequence, 0 to `sequences` − 1.
        sequences: N, in this micro-batch.
        step_sequences: B, in the whole step.
        correction: the weights of the arm.
        clip: its clipped ratio; None for the plain policy gradient.
        logp_old_T: [T] nats, log π_train_old^mp, from before the first update on these rollouts; −inf outside V_S. None
            at the first update, where the present log-probs are the old ones.
        expected_T: [T] with gradient, `centering.expected_score`; None without centering.
        segment_T: int64 [T], each token's segment, for rejections by segment; None: a response is one segment.
        age_T: [T], how many versions the sampler's weights are behind, which A-3PO's clip needs.

    Raises:
        StudyError: not one entry a token, no expected score for centering, no age for A-3PO, or the sampler's log-probs
            are above 0.
        NumericalError: a log-prob of the sampler is not finite, one from before the first update is NaN, a weight
            overflows (`correct`), or the loss does.
    """
    logp_T = logprobs.logp_T
    check_packed(sequences, sequence_T, logp_T=logp_T, logp_infer_T=logp_infer_T, advantage_T=advantage_T)
    check_logprobs(logp_infer_T)
    if not logp_infer_T.isfinite().all():
        raise NumericalError("a log-prob of the sampler is not finite")
    if clip is not None and clip.proximal == "loglinear":
        logp_old_T = proximal_logprobs(logp_T.detach(), logp_infer_T, age_T)
    elif logp_old_T is None:
        logp_old_T = logp_T.detach()
    outside_T = logprobs.outside_T | logp_old_T.isneginf()
    logp_old_T = logp_old_T.masked_fill(outside_T, 0.0)
    if logp_old_T.isnan().any():  # a rule that keeps a range would drop it without a word
        raise NumericalError("a log-prob of the trainer before the first update is NaN")
    delta_T = logp_old_T - logp_infer_T
    others = (logp_T.detach() - logp_old_T, logp_infer_T, advantage_T.to(delta_T.dtype))
    weights = correct(delta_T, outside_T, sequence_T, sequences, correction, *others, segment_T)
    if (correction.centering == "none") != (expected_T is None):
        raise StudyError("correction.centering needs the sampler's whole distribution at every token")
    if clip is None:
        loss = policy_gradient(logp_T, advantage_T, weights.weight_T, step_sequences)
        if expected_T is not None:
            loss = loss - policy_gradient(expected_T, advantage_T, weights.sequence_N[sequence_T], step_sequences)
        loss = loss + log_ratio_term(correction, logp_T, logp_infer_T, outside_T, step_sequences)
        check_loss(loss)
        return Surrogate(loss, weights, torch.zeros_like(outside_T))
    # A token outside V_S has ratio 0 under each ratio: no term, no gradient.
    weight_T = weights.weight_T.masked_fill(outside_T, 0.0)
    if clip.ratio == "decoupled":
        weight_T = times(weight_T, delta_T.exp())
    if clip.loss in OF_RESPONSES:
        weight_T = weight_T.masked_fill(sequence_any(outside_T, sequence_T, sequences)[sequence_T], 0.0)
    loss, clipped_T = ratio_loss(
        clip.loss,
        logp_T=logp_T,
        logp_old_T=logp_infer_T if clip.ratio == "bypass" else logp_old_T,
        advantage_T=advantage_T,
        weight_T=weight_T,
        sequence_T=sequence_T,
        sequences=sequences,
        clip=clip.bounds,
        step_sequences=step_sequences,
        log_ratio_limit=clip.limit,
        dual=clip.dual_bound,
    )
    loss = loss + log_ratio_term(correction, logp_T, logp_infer_T, outside_T, step_sequences)
    check_loss(loss)
    return Surrogate(loss, weights, clipped_T & ~outside_T)
