"""The policy-gradient loss of one packed micro-batch."""

from torch import Tensor

from tailrl.objective.corrections import sequence_sum


def policy_gradient(
    logp_T: Tensor, sequence_T: Tensor, advantage_N: Tensor, weight_N: Tensor, step_sequences: int
) -> Tensor:
    """−(1/B) Σ_y w_y A_y Σ_t log π(y_t): its gradient is the estimator of Theorem 5.3 (w = 1: naive).

    Args:
        logp_T: float32 [T] with gradient, log-probs of the sampled tokens; 0 for a token that is dropped.
        sequence_T: int64 [T], the sequence of each token.
        advantage_N: float32 [N].
        weight_N: float32 [N], stop-gradient.
        step_sequences: B, all sequences sampled in the step; rejected ones count as zeros, so the micro-batches
            of a step add up to one mean.

    Returns:
        A scalar with gradient.
    """
    logp_N = sequence_sum(logp_T, sequence_T, len(advantage_N))
    return -(weight_N.detach() * advantage_N * logp_N).sum() / step_sequences
