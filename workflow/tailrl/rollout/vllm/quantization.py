"""What a quantised vLLM needs beyond its loaders: how it is told, what is refused, and what a reload leaves undone.

Three traps of vLLM 0.32, each without an error:

- On a CPU with AMX int4 weights meet activations rounded to int8 unless `VLLM_CPU_INT4_W4A8=0`, as it is set here.
- A quantised model has scales for its keys and values, which a reload fills with what was in memory.
- oneDNN's int8 kernel keeps the address of the weights' scales. A reload copies the scales elsewhere and frees them.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.attention.attention import Attention, set_default_quant_scales
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors import schemes

from tailrl.config.cpu_formats import lacking
from tailrl.config.sampler import FewBits
from tailrl.runtime.devices import cpu_flags
from tailrl.runtime.errors import ConfigurationError, ModelError

SCHEMES: dict[type, str] = {
    schemes.CompressedTensorsW8A8Int8: "int8",
    schemes.CompressedTensorsWNA16: "int4",
    schemes.CompressedTensorsW8A8Fp8: "fp8",
}
"""vLLM's arithmetic of a linear layer in each format."""

FIRST_FLOAT8 = (8, 9)
"""The compute capability of the first GPUs that multiply float8."""


def overrides(settings: FewBits) -> dict[str, Any]:
    """The part of the policy's configuration that says how its weights are quantised; empty where they are not."""
    kind, group = settings.quantization, settings.group_size
    if kind is None:
        return {}
    weights: dict[str, Any] = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "strategy": "channel" if group is None else "group",
        "symmetric": True,
        "dynamic": False,
    }
    if group is not None:
        weights["group_size"] = group
    activations = weights | {"strategy": "token", "dynamic": True} if kind != "int4" else None
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}[kind],
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        }
    }


def prepare(settings: FewBits) -> None:
    """Raises StudyError where this machine would emulate the format or compute in another; call it before the start."""
    gpu = torch.cuda.is_available()
    if settings.quantization == "fp8" and not gpu:
        raise ConfigurationError(
            "sampler.quantization: fp8 needs a GPU: vLLM emulates it on a CPU, where int8 and int4 run"
        )
    if settings.quantization == "fp8" and torch.cuda.get_device_capability() < FIRST_FLOAT8:
        raise ConfigurationError(
            "sampler.quantization: this GPU does not multiply float8, so that vLLM would compute with 16-bit "
            "activations; int8 and int4 run here"
        )
    if settings.quantization in ("int8", "fp8") and gpu and settings.dtype == "float32":
        raise ConfigurationError(
            f"sampler.quantization: {settings.quantization} computes in half precision on a GPU: say dtype: bfloat16 "
            "or float16"
        )
    if words := missing_instructions(settings):
        raise ConfigurationError(words)
    if not gpu and settings.quantization == "int8":
        _hold_scales()


def missing_instructions(settings: FewBits) -> str:
    """Why this CPU cannot compute in the format; empty if it can, and on a GPU."""
    reasons = {} if torch.cuda.is_available() else lacking(settings, cpu_flags())
    return next((f"sampler.{key}: {words}" for key, words in reasons.items()), "")


def finish_reload(model: nn.Module) -> None:
    """Give keys and values the scale 1 after a reload; raises StudyError where int4 is computed in another format."""
    for module in model.modules():
        if isinstance(module, Attention):
            set_default_quant_scales(module)
        if getattr(module, "use_w4a8", False):
            raise ModelError("sampler.quantization: vLLM computes int4 weights with activations of 8 bits here")


def formats(model: nn.Module) -> tuple[set[str], set[str]]:
    """The formats of all linear layers but the head, and those of all caches of keys and values."""
    weights = {_format(module) for module in model.modules() if isinstance(module, LinearBase)}
    return weights, {module.kv_cache_dtype for module in model.modules() if isinstance(module, Attention)}


def check_formats(llm: Any, settings: FewBits) -> None:
    """Raises StudyError where an engine computes in another format than its settings ask for.

    Log-probs may differ too little for `twin.check_twin`: int8 changes them about as much as bfloat16 does.
    """
    asked = {_words(settings.quantization, settings.group_size)}, {str(settings.kv_cache_dtype)}

    def said(formats: tuple[set[str], set[str]]) -> str:
        return "; ".join(", ".join(sorted(part)) or "none" for part in formats)

    for found in llm.collective_rpc("formats"):
        if found != asked:
            raise ModelError(
                f"sampler: vLLM computes in another format (weights; cache): {said(found)}, and not {said(asked)}"
            )


def _format(layer: nn.Module) -> str:
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        plain = isinstance(layer.quant_method, UnquantizedLinearMethod)
        return _words(None if plain else type(layer.quant_method).__name__, None)
    group = getattr(scheme, "group_size", None)
    return _words(SCHEMES.get(type(scheme), type(scheme).__name__), group if group != -1 else None)


def _words(quantization: str | None, group: int | None) -> str:
    return (quantization or "as they are") + (f" in groups of {group}" if group else "")


def rounds_queries(model: nn.Module) -> bool:
    """Whether attention rounds queries to the format of the cache, as FlashAttention 3 does."""
    layers = (module for module in model.modules() if isinstance(module, Attention))
    return any(layer.query_quant is not None for layer in layers)


def _hold_scales() -> None:
    """Have each int8 layer keep the scales whose address its kernel has."""
    process = CPUInt8ScaledMMLinearKernel.process_weights_for_onednn
    if getattr(process, "holds_scales", False):
        return

    def holding(kernel: Any, layer: nn.Module) -> None:
        process(kernel, layer)
        kernel.held_scales = getattr(layer, kernel.layer_param_names[1])

    holding.holds_scales = True  # type: ignore[attr-defined]
    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = holding
