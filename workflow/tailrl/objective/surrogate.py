"""The loss of an arm on packed tokens: log-probs of both engines to weights to one scalar.

What training follows, and what `tailrl.gradients` holds against the exact gradient: the same function.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrl.objective.corrections import Weights, correct
from tailrl.objective.losses import clipped_ratio, policy_gradient
from tailrl.settings import Clip, Correction
from tailrl.vocabulary import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss (a scalar with gradient), the weights in it, and bool [T]: where the clipped branch is taken."""

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
) -> Surrogate:
    """The share of one micro-batch in the loss of a step.

    Args:
        logprobs: the trainer's, of T tokens.
        logp_infer_T: [T] nats, the sampler's log π'^mp of the same tokens.
        advantage_T: [T], the advantage of each token's sequence.
        sequence_T: int64 [T], the sequence that each token belongs to, 0 to `sequences` − 1.
        sequences: N, in this micro-batch.
        step_sequences: B, in the whole step.
        correction: the weights of the arm.
        clip: its clipped ratio; None for the plain policy gradient.
        logp_old_T: [T] nats, the trainer's before the first update on these rollouts, −inf outside its set; None
            where this update is the first, and the present log-probs are the old ones.
    """
    logp_T = logprobs.logp_T
    if logp_old_T is None:
        logp_old_T = logp_T.detach()
    outside_T = logprobs.outside_T | logp_old_T.isneginf()
    logp_old_T = logp_old_T.masked_fill(outside_T, 0.0)
    delta_T = logp_old_T - logp_infer_T
    weights = correct(delta_T, outside_T, sequence_T, sequences, correction, logp_T.detach() - logp_old_T)
    if clip is None:
        loss = policy_gradient(logp_T, advantage_T, weights.weight_T, step_sequences)
        return Surrogate(loss, weights, torch.zeros_like(outside_T))
    # A token outside the set has ratio 0 in every convention: no term, no gradient.
    weight_T = weights.weight_T.masked_fill(outside_T, 0.0)
    if clip.ratio == "decoupled":
        # Not 0 × exp(Δ): a rejected token may have a ratio that overflows.
        weight_T = torch.where(weight_T > 0, weight_T * delta_T.exp(), 0.0)
    reference_T = logp_infer_T if clip.ratio == "bypass" else logp_old_T
    loss, clipped_T = clipped_ratio(logp_T, reference_T, advantage_T, weight_T, (clip.low, clip.high), step_sequences)
    return Surrogate(loss, weights, clipped_T & ~outside_T)
