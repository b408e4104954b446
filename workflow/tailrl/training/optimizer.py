"""The optimizers, one optimizer step, and a gradient's scale."""

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tailrl.config.training import Training
from tailrl.runtime.distributed import whole
from tailrl.runtime.errors import NumericalError
from tailrl.training.placement import is_sharded


def make_optimizer(model: PreTrainedModel, settings: Training) -> torch.optim.Optimizer:
    """AdamW, whose step size does not follow the gradient's size, or SGD with momentum, whose step size does."""
    rate, (first, _) = settings.learning_rate, settings.betas
    if settings.optimizer == "sgd":
        # torch has no fused SGD kernel for sharded tensors.
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=first, fused=not is_sharded(model))
    decay = settings.weight_decay
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=settings.betas, weight_decay=decay, fused=True)


def optimizer_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    """Clip the gradient, take the step, clear the gradient; returns the norm before clipping.

    Raises:
        NumericalError: the norm is not finite; nothing is changed.
    """
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)).item()
    if not np.isfinite(norm):
        raise NumericalError(f"the gradient's norm is {norm}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def scale_gradient(model: PreTrainedModel, factor: float) -> None:
    """Multiply the model's gradient by a factor."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
