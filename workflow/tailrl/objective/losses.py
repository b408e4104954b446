"""The losses of one packed micro-batch: each a sum over tokens, divided by the sequences of the whole step.

Rejected sequences count as zeros in the mean, so that the micro-batches of a step add up to one mean.
"""

import torch
from torch import Tensor


def policy_gradient(logp_T: Tensor, advantage_T: Tensor, weight_T: Tensor, step_sequences: int) -> Tensor:
    """−(1/B) Σ_t w_t A_t log π(y_t): its gradient is the estimator of Theorem 5.3 (w = 1: naive).

    Args:
        logp_T: float32 [T] with gradient, log-probs of the sampled tokens; 0 for a token that is dropped.
        advantage_T: float32 [T], the advantage of the token's sequence.
        weight_T: float32 [T], stop-gradient.
        step_sequences: B, all sequences sampled in the step.

    Returns:
        A scalar with gradient.
    """
    return -(weight_T.detach() * advantage_T * logp_T).sum() / step_sequences


def clipped_ratio(
    logp_T: Tensor,
    logp_old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    clip: tuple[float, float],
    step_sequences: int,
) -> tuple[Tensor, Tensor]:
    """PPO's surrogate −(1/B) Σ_t w_t min(r_t A_t, clip(r_t, 1 − low, 1 + high) A_t) with r = exp(log π − log π_old).

    At r = 1 its gradient is that of `policy_gradient`.

    Args:
        logp_T: float32 [T] with gradient.
        logp_old_T: float32 [T], stop-gradient: the trainer's before the first update on these rollouts
            (recompute, decoupled) or the sampler's (bypass).
        advantage_T: float32 [T].
        weight_T: float32 [T], stop-gradient; for decoupled it holds π_train_old / π_rollout_old.
        clip: (low, high).
        step_sequences: B.

    Returns:
        A scalar with gradient, and bool [T]: where the clipped branch is taken, and no gradient flows.
    """
    ratio_T = (logp_T - logp_old_T.detach()).exp()
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1 - clip[0], 1 + clip[1]) * advantage_T
    loss = -(weight_T.detach() * torch.minimum(free_T, clipped_T)).sum() / step_sequences
    return loss, (clipped_T < free_T).detach()
