"""Placement of the trained policy: its device, whole or sharded, and the dtypes of its computation and weights.

One process in float32 has the plain model. Everything else is FSDP2 (`fully_shard`), over a mesh of one rank too. The
optimizer changes float32 shares. Each layer's weights are gathered in the compute dtype before its forward and before
its backward, and its gradient returns to the shares in float32. The loss is already divided by the responses of the
whole step, so gradients are summed over the ranks, not averaged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TypeVar, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.config.training import Training
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError

Result = TypeVar("Result")


def decided(run: Run) -> Run:
    """The run with its number format, where the settings leave it to the machine."""
    dtype = run.computed_in(_on_gpu())
    return run.model_copy(update={"training": run.training.model_copy(update={"dtype": dtype})})


def number_formats(run: Run) -> str | None:
    """What a user is told of the numbers in which a GPU trains; None on a CPU, which has float32 or what was asked."""
    if not _on_gpu():
        return None
    if run.training.dtype == "bfloat16":
        return "trains in bfloat16 on a GPU; weights, sums of gradients and the optimizer's state are float32"
    if run.sampler.exact:
        return "trains in float32 on a GPU, without TF32, since an engine has the trainer's own bits"
    return (
        "trains in float32 on a GPU, its products in TF32, and pads rows for attention, since its kernel for packed "
        "rows takes half precision alone; training.dtype: bfloat16 is much faster"
    )


@contextmanager
def tensor_floats(sampler: SamplerSettings) -> Iterator[None]:
    """Within the block a GPU multiplies float32 matrices in TF32, unless the engine needs the trainer's own bits.

    An engine in this process has its own choice, which comes back afterwards.
    """
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    if _on_gpu():
        products.allow_tf32 = not sampler.exact
    try:
        yield
    finally:
        products.allow_tf32 = before


def _on_gpu() -> bool:
    return distributed.device().type == "cuda"


def place(model: PreTrainedModel, settings: Training) -> None:
    """Move a whole policy from the CPU to where it is trained; call it before making the optimizer.

    Args:
        model: float32, the same on every rank.
        settings: the compute dtype (`decided`; auto is float32), and whether the backward computes each layer's
            activations again.

    Raises:
        StudyError: the model must be cut into layers but does not name them.
    """
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    half = settings.dtype == "bfloat16"
    alone = distributed.count() == 1 and not half
    if not layers and (settings.activation_checkpointing or not alone):
        raise ModelError(
            f"{type(model).__name__} does not name its layers: it can be trained by one process, in float32 and "
            "without activation_checkpointing"
        )
    if settings.activation_checkpointing:
        for layer in layers:
            # Inside FSDP's hooks around `forward`: a layer that is computed again already has its weights.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if alone:
        model.to(distributed.device())
        return
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if half else MixedPrecisionPolicy()
    mesh = distributed.mesh()
    for module in (*layers, model):
        # The root too, so that a forward without a backward leaves no whole weights behind.
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        # Only NCCL divides by 1 in a reduction; gloo sums.
        sharded.set_force_sum_reduction_for_comms(True)
    model.as_forward = MethodType(lambda _, function: function(), model)
    register_fsdp_forward_method(model, "as_forward")


def as_forward(model: PreTrainedModel, function: Callable[[], Result]) -> Result:
    """The function's result, computed as the model's forward: every weight outside the layers is whole in it.

    So the head's weight can be used beside the backbone, and its gradient is reduced like all others.
    """
    return cast(Result, model.as_forward(function)) if is_sharded(model) else function()


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether the model's weights are sharded."""
    return isinstance(model, FSDPModule)


def give_up_forward(model: PreTrainedModel) -> None:
    """Shard every weight again after a forward without a backward; every rank must call."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
