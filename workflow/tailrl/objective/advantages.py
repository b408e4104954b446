"""Estimators: how the rewards of a step become advantages."""

from torch import Tensor


def rloo(rewards_PG: Tensor) -> Tensor:
    """Leave-one-out advantages: A_i = R_i − mean of the other rewards of the same prompt.

    Args:
        rewards_PG: float [P, G], G ≥ 2 responses for each of P prompts.

    Returns:
        float [P, G]; each row sums to zero.
    """
    group = rewards_PG.shape[1]
    others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (group - 1)
    return rewards_PG - others_PG


ESTIMATORS = {"rloo": rloo}
