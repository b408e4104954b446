"""Estimators: rewards R, float [P, G], to advantages A of the same shape; G ≥ 2 responses to each of P prompts.

Each raises StudyError where the rewards have another shape.
"""

from collections.abc import Callable

from torch import Tensor

from tailrl.runtime.errors import ConfigurationError, DataError
from tailrl.runtime.import_path import called, is_import_path

GRPO_EPSILON = 1e-6
"""Added to a group's standard deviation: equal rewards then give 0, not nan."""


def _checked(rewards_PG: Tensor) -> Tensor:
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise DataError(
            f"rewards must be [P, G], of G ≥ 2 responses to each of P prompts, not {list(rewards_PG.shape)}"
        )
    return rewards_PG


def rloo(rewards_PG: Tensor) -> Tensor:
    """RLOO, the DVP paper's: A_i = R_i − 1/(G − 1) Σ_{j≠i} R_j within a prompt; each row sums to zero."""
    group = _checked(rewards_PG).shape[1]
    others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (group - 1)
    return rewards_PG - others_PG


def reinforce(rewards_PG: Tensor) -> Tensor:
    """REINFORCE with a batch baseline: A_i = R_i − mean of the other rewards of the whole step.

    A response's own reward is left out of its baseline, so that the estimator stays unbiased.
    """
    others_PG = (_checked(rewards_PG).sum() - rewards_PG) / (rewards_PG.numel() - 1)
    return rewards_PG - others_PG


def grpo(rewards_PG: Tensor) -> Tensor:
    """GRPO: A_i = (R_i − mean) / (sample standard deviation + 1e-6), both over the prompt's group."""
    centred_PG = _checked(rewards_PG) - rewards_PG.mean(1, keepdim=True)
    return centred_PG / (rewards_PG.std(1, keepdim=True) + GRPO_EPSILON)


def advantages_of(estimator: str, rewards_PG: Tensor) -> Tensor:
    """Advantages [P, G] by an estimator's name, or by the import path of one.

    Raises:
        StudyError: a function by import path gives another shape, or what is not finite.
    """
    if not is_import_path(estimator):
        return ESTIMATORS[estimator](rewards_PG)
    found_PG = called(estimator, _checked(rewards_PG))
    if not isinstance(found_PG, Tensor) or found_PG.shape != rewards_PG.shape or not found_PG.isfinite().all():
        what = list(found_PG.shape) if isinstance(found_PG, Tensor) else type(found_PG).__name__
        raise ConfigurationError(
            f"{estimator}: must give finite advantages of the rewards' shape {list(rewards_PG.shape)}, not {what}"
        )
    return found_PG


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"rloo": rloo, "reinforce": reinforce, "grpo": grpo}

STEP_WIDE = frozenset({"reinforce"})
"""Estimators that need the rewards of the whole step; the others need one prompt's group."""
