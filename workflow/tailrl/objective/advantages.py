"""Estimators: how the rewards of a step become advantages.

Each takes rewards float [P, G], G ≥ 2 responses for each of P prompts, and returns advantages of that shape.
"""

from collections.abc import Callable

from torch import Tensor

GRPO_EPSILON = 1e-6
"""Added to the standard deviation of a group, so that a group of equal rewards gives 0 and not nan."""


def rloo(rewards_PG: Tensor) -> Tensor:
    """Leave-one-out: A_i = R_i − mean of the other rewards of the same prompt; each row sums to zero."""
    group = rewards_PG.shape[1]
    others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (group - 1)
    return rewards_PG - others_PG


def reinforce(rewards_PG: Tensor) -> Tensor:
    """REINFORCE with a batch baseline: A_i = R_i − mean of the other rewards of the whole step.

    Leave-one-out over the step rather than its plain mean, so that a response's baseline does not depend on
    its own reward and the estimator stays unbiased.
    """
    others_PG = (rewards_PG.sum() - rewards_PG) / (rewards_PG.numel() - 1)
    return rewards_PG - others_PG


def grpo(rewards_PG: Tensor) -> Tensor:
    """GRPO: (R_i − mean of the prompt's group) / its standard deviation (of a sample, as in public code)."""
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return centred_PG / (rewards_PG.std(1, keepdim=True) + GRPO_EPSILON)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"rloo": rloo, "reinforce": reinforce, "grpo": grpo}

STEP_WIDE = frozenset({"reinforce"})
"""Estimators that look at the rewards of the whole step; the others look at one prompt's group at a time."""
