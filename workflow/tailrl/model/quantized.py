"""The trainer's model in the number formats of a quantised engine: the engine's twin.

Weights, activations, keys and values are rounded as `model.quantize` says, and everything else is computed as the model
computes it. All roundings are straight-through: the gradient is that at the rounded numbers. `objective.disturbance.
computing_with` puts the rounded weights into a trained model.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrl.config.sampler import FewBits, SamplerSettings, VllmSettings
from tailrl.model.forward import CACHE_ROUNDING, QUERY_ROUNDING, head_size, make_exact
from tailrl.model.quantize import CACHES, rounded_cache, rounded_rows, rounded_weight, straight_through
from tailrl.runtime.errors import ConfigurationError

KERNEL_MULTIPLE = 32
"""Inputs and outputs of an int4 weight are a multiple of it: vLLM's kernels have no remainder."""


def projections(model: PreTrainedModel) -> frozenset[str]:
    """The names of the weights that an engine quantises: those of all linear layers but the head."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return frozenset(f"{name}.weight" for name, m in modules if isinstance(m, nn.Linear) and m is not head)


def check_cache(model: PreTrainedModel, settings: VllmSettings) -> None:
    """Raises StudyError where vLLM has no cache in 8 bits of the model's heads."""
    if settings.kv_cache_dtype != "auto" and not torch.cuda.is_available():
        size = head_size(model.config)
        if size % KERNEL_MULTIPLE:
            raise ConfigurationError(
                "sampler.kv_cache_dtype: on a CPU vLLM's fp8 cache takes heads of a multiple of "
                f"{KERNEL_MULTIPLE}, not of {size}"
            )


def check_sizes(model: PreTrainedModel, settings: FewBits) -> None:
    """Raises StudyError where the model has a matrix that is no linear layer's, or sizes that the format refuses."""
    if settings.quantization is None:
        return
    known = projections(model)
    tables = {id(model.get_output_embeddings().weight)}
    tables |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    share = settings.group_size or KERNEL_MULTIPLE
    for name, weight in model.named_parameters():
        if name not in known and weight.ndim > 1 and id(weight) not in tables:
            raise ConfigurationError(
                f"sampler.quantization: {name} is not the weight of a linear layer, as experts' are not"
            )
        if name in known and settings.quantization == "int4":
            outputs, inputs = weight.shape
            if outputs % KERNEL_MULTIPLE or inputs % KERNEL_MULTIPLE or inputs % share:
                raise ConfigurationError(
                    f"sampler.quantization: int4 needs {KERNEL_MULTIPLE} to divide a weight's sizes, and "
                    f"group_size its inputs; {name} has {outputs} outputs and {inputs} inputs"
                    + (f" in groups of {settings.group_size}" if settings.group_size else "")
                )


def rounded_weights(
    weights: Iterable[tuple[str, Tensor]], names: Collection[str], formats: FewBits | None
) -> Iterator[tuple[str, Tensor]]:
    """Named weights as the engine has them, in their own dtype; those with other names than `names` unchanged."""
    for name, weight in weights:
        if formats and formats.quantization and name in names:
            weight = rounded_weight(weight, formats)
        yield name, weight


def match_engine(model: PreTrainedModel, settings: SamplerSettings) -> None:
    """Give a trained model the operators of an engine with the trainer's own bits, and the roundings that it has."""
    make_exact(model)
    if settings.quantizes_trainer and settings.formats:
        round_activations(model, settings.formats, control_rounds_queries(settings.formats))


def control_rounds_queries(settings: FewBits) -> bool:
    """Whether a matched control rounds queries as it does keys and values: as vLLM 0.32 with FlashAttention 3.

    vLLM takes it for compute capability 9.0 and an e4m3 cache (seen on an H100). Where vLLM's other kernels differ from
    the control, the engine's start says so.
    """
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return hopper and settings.kv_cache_dtype == "fp8_e4m3"


def round_activations(model: PreTrainedModel, settings: FewBits, queries: bool = False) -> None:
    """From now on the model rounds the inputs of its linear layers, and its keys and values, as the engine does.

    `queries`: in attention queries too, in the format of keys and values, as on some GPUs.
    """
    if settings.quantization in ("int8", "fp8"):
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.register_forward_pre_hook(_rounding(settings.quantization))
    if settings.kv_cache_dtype != "auto":
        dtype, toward_zero = CACHES[settings.kv_cache_dtype], not torch.cuda.is_available()

        def rounding(numbers: Tensor) -> Tensor:
            return straight_through(numbers, rounded_cache(numbers, dtype, toward_zero))

        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, CACHE_ROUNDING, rounding)
                if queries:
                    setattr(module, QUERY_ROUNDING, rounding)


def _rounding(quantization: str) -> Any:
    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return straight_through(given[0], rounded_rows(given[0], quantization)), *given[1:]

    return hook
