"""Where the trained policy lies: on this rank's device, whole or sharded, and what its layers compute in and keep.

One process in float32 has the plain model. Everything else is FSDP2 (`fully_shard`), over a mesh of one rank too: the
weights that the optimizer changes are float32 shares, each layer's are gathered in the dtype that it computes in before
its forward and before its backward, and its gradient goes back to the shares in float32. The loss is divided by the
responses of the whole step, so that gradients are summed over the ranks and not averaged.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tailrl.config.training import Training
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError

Result = TypeVar("Result")


def place(model: PreTrainedModel, settings: Training, exact: bool = False) -> None:
    """Puts a policy, which lies whole on the CPU, where it is trained; before its optimizer is made.

    Args:
        model: float32, the same on every rank.
        settings: the dtype it computes in, and whether each layer's activations are computed again in the backward.
        exact: whether an engine is to meet its bits; the operators that promise so do on a CPU.

    Raises:
        StudyError: it does not say what its layers are, and should be cut into them.
    """
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    alone = distributed.count() == 1 and settings.dtype == "float32"
    if not layers and (settings.activation_checkpointing or not alone):
        raise StudyError(
            f"{type(model).__name__} does not name its layers: it can be trained by one process, in float32 and "
            "without activation_checkpointing"
        )
    if settings.activation_checkpointing:
        for layer in layers:
            # Within FSDP's hooks, which stand around `forward`: a layer that is computed again has its weights already.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if alone:
        model.to("cpu" if exact else distributed.device())
        return
    dtype = getattr(torch, settings.dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    _shard(model, layers, MixedPrecisionPolicy() if dtype == torch.float32 else policy)


def _shard(model: PreTrainedModel, layers: list[nn.Module], policy: MixedPrecisionPolicy) -> None:
    mesh = distributed.mesh()
    for module in (*layers, model):
        # The root too, by which a pass without a backward leaves nothing whole behind.
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        # Division by 1 as a reduction of its own is NCCL's alone; gloo sums.
        sharded.set_force_sum_reduction_for_comms(True)
    model.as_forward = MethodType(lambda _, function: function(), model)
    register_fsdp_forward_method(model, "as_forward")


def as_forward(model: PreTrainedModel, function: Callable[[], Result]) -> Result:
    """What the function returns, computed as the model's forward: within it every weight outside the layers is whole.

    That is how the head's weight can be used beside the backbone: its gradient goes the way of all others.
    """
    return (
        cast(Callable[[Callable[[], Result]], Result], model.as_forward)(function) if is_sharded(model) else function()
    )


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether its weights are shares."""
    return isinstance(model, FSDPModule)


def give_up_forward(model: PreTrainedModel) -> None:
    """After a forward on every rank whose backward does not come: every weight is a share again."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
