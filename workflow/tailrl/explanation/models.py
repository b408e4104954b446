"""Hypotheses on weights and arithmetic: another number format, another checkpoint. `catalogue.yaml` names them.

Each gets a copy of the model, changes it and returns it; None where it does not apply. The copy shares the model's
weights: a weight is replaced (`weight.data = ...`), never changed in place. Formats of few bits are those of
`model.quantize`, which are held to vLLM's own.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tailrl.artifacts.files import parse_object, read_text
from tailrl.config.sampler import VllmSettings
from tailrl.explanation.inputs import Context
from tailrl.model.policy import load_policy
from tailrl.model.quantize import rounded_weight
from tailrl.model.quantized import projections, round_activations
from tailrl.runtime.errors import ModelError

# Attributes that a changed model carries to the scorer.
LOGITS_TOO = "explained_logits_too"  # true: the head computes in 16 bits as well
HEAD_INPUTS = "explained_head_inputs"  # a function that rounds the head's inputs
TF32_DROPPED_BITS = 13  # of float32's 23 bits of mantissa
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def dtype(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001 - the interface of all
    """Weights and activations in another number format, logits in float32; with `_logits` logits too."""
    setattr(model, LOGITS_TOO, value.endswith("_logits"))
    return model.to(getattr(torch, value.removesuffix("_logits")))


def weights_dtype(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001
    """Weights rounded to another number format; computed in the model's own."""
    for parameter in model.parameters():
        parameter.data = parameter.to(getattr(torch, value)).to(parameter.dtype)
    return model


def tf32(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001
    """Linear layers and the head in TF32: inputs and weights with 10 bits of mantissa, sums in float32.

    As `torch.backends.cuda.matmul.allow_tf32` does on a GPU. Attention stays in float32.
    """
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # the embeddings, which may be tied to it, are no product
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = rounded_tf32(module.weight)
            if module is not head:
                module.register_forward_pre_hook(lambda _, inputs: (rounded_tf32(inputs[0]), *inputs[1:]))
    setattr(model, HEAD_INPUTS, rounded_tf32)
    return model


def rounded_tf32(numbers: Tensor) -> Tensor:
    """Float32 numbers with 10 bits of mantissa, the nearest ones; ties away from zero, as cvt.rna.tf32 does."""
    half, dropped = 1 << (TF32_DROPPED_BITS - 1), (1 << TF32_DROPPED_BITS) - 1
    return ((numbers.float().contiguous().view(torch.int32) + half) & ~dropped).view(torch.float32)


def router_dtype(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """Routers of a mixture in another number format: near ties go to other experts. The experts stay as they are."""
    gates = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    for gate in gates:
        gate.to(getattr(torch, value))
        gate.register_forward_pre_hook(_to_weights_dtype)
        gate.register_forward_hook(_to_float)
    return model if gates else None


def _to_weights_dtype(gate: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].to(next(gate.parameters()).dtype), *inputs[1:]


def _to_float(_: nn.Module, __: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.float() if one.is_floating_point() else one for one in outputs)


def quantized(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """Linear layers in few bits: int8, fp8, int4, or int4_N with N inputs to a scale.

    `_weights`: activations stay. Where they meet another arithmetic, their rounding is noise that none repeats, and the
    weights' part is what can be predicted. `_stored`: likewise, with scales as compressed-tensors stores them.
    """
    kind, *rest = value.split("_")
    group = next((int(part) for part in rest if part.isdigit()), None)
    settings = VllmSettings(quantization=kind, group_size=group)
    names = projections(model)
    for name, weight in model.named_parameters():
        if name in names:
            if group and weight.shape[-1] % group:
                return None
            rounded = _stored(weight, kind, group) if "stored" in rest else rounded_weight(weight, settings)
            weight.data = rounded.to(weight.dtype)
    if not {"weights", "stored"} & {*rest}:
        round_activations(model, settings)
    return model


def _stored(weight_OI: Tensor, kind: str, group: int | None) -> Tensor:
    """A weight as compressed-tensors stores one in bfloat16: a scale is the largest number over half the range."""
    bits = int(kind.removeprefix("int"))
    grouped_OGN = weight_OI.bfloat16().view(len(weight_OI), -1, group or weight_OI.shape[-1])
    scale_OG1 = (grouped_OGN.abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)).clamp(min=1e-12)
    level_OGN = (grouped_OGN / scale_OG1).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rounded_OI: Tensor = (level_OGN.float() * scale_OG1.float()).view(weight_OI.shape).to(weight_OI.dtype)
    return rounded_OI


def cache(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001
    """Keys and values in float8."""
    round_activations(model, VllmSettings(kv_cache_dtype=value))
    return model


def rope_base(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """Rotary positions of another base: the number is the factor of the model's own."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    base = parameters.get("rope_theta")
    if not base or value * base <= 1:
        return None
    exponent = float(torch.log(torch.tensor(value * base)) / torch.log(torch.tensor(float(base))))
    return _with_frequencies(model, lambda frequency: frequency**exponent)


def rope_scale(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """Rotary positions divided by a number, as linear scaling does."""
    return _with_frequencies(model, lambda frequency: frequency / value)


def rope_type(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """Rotary positions of another type: `default`, or TYPE_FACTOR, with the definitions of transformers."""
    kind, _, factor = value.partition("_")
    parameters = getattr(model.config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters or parameters.get("rope_type", "default") == kind:
        return None
    longest = parameters.get("original_max_position_embeddings", model.config.max_position_embeddings)
    changed = {
        "rope_type": kind,
        "rope_theta": parameters["rope_theta"],
        **({"factor": float(factor), "original_max_position_embeddings": longest} if factor else {}),
        **(LLAMA3 if kind == "llama3" else {}),
    }
    config = copy.deepcopy(model.config)
    config.rope_parameters = changed
    return _with_ropes(model, lambda module: type(module)(config=config))


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of Llama 3.1 and 3.2


def longrope(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """The long or the short factors of a rope of the type longrope, whatever the length of a sequence."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return None
    length = parameters["original_max_position_embeddings"] + (1 if value == "long" else 0)

    def fixed(module: nn.Module) -> nn.Module:
        frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](model.config, module.inv_freq.device, seq_len=length)
        module.inv_freq = frequencies
        vars(module).update(attention_scaling=scaling, rope_type="default")
        return module

    return _with_ropes(model, fixed)


def _with_ropes(model: PreTrainedModel, change: Any) -> PreTrainedModel | None:
    ropes = {name: module for name, module in model.named_modules() if hasattr(module, "attention_scaling")}
    for name, module in ropes.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, change(module).to(module.inv_freq.device))
    return model if ropes else None


def _with_frequencies(model: PreTrainedModel, change: Any) -> PreTrainedModel | None:
    changed = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    for module in changed:
        module.inv_freq = change(module.inv_freq)
    return model if changed else None


def head_of_embeddings(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """The head has the embeddings' weights, which a tied checkpoint has and this one has not."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is table.weight or torch.equal(head.weight, table.weight):
        return None
    head.weight = nn.Parameter(table.weight.detach().clone())
    return model


def other_weights(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel | None:
    """The weights of another folder, by its number among those given."""
    if int(value) >= len(context.others):
        return None
    other = load_policy(context.others[int(value)])
    weights = {name: weight.to(model.device) for name, weight in other.state_dict().items()}
    own = model.state_dict()
    if {name: weight.shape for name, weight in weights.items()} != {n: w.shape for n, w in own.items()}:
        raise ModelError(f"{context.others[int(value)]}: its weights do not have the shapes of the model's")
    model.load_state_dict(weights, assign=True)
    return model


def adapter(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel | None:
    """The model plus a multiple of the given adapter: 1 merges it, -1 takes it out of merged weights."""
    if not context.adapters:
        return None
    parameters = dict(model.named_parameters())
    for name, update in adapter_updates(Path(context.adapters[0])).items():
        if name not in parameters or parameters[name].shape != update.shape:
            raise ModelError(f"{context.adapters[0]}: the model has no weight {name} of the shape {list(update.shape)}")
        weight = parameters[name]
        weight.data = weight + value * update.to(weight.dtype)
    return model


def adapter_updates(folder: Path) -> dict[str, Tensor]:
    """What an adapter of PEFT (LoRA) adds to each weight, by the weight's name; raises StudyError for any other."""
    file = folder / ADAPTER_CONFIG
    settings = parse_object(read_text(file).encode(), str(file))
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except Exception as error:  # the library has its own
        raise ModelError(f"{folder / ADAPTER_WEIGHTS}: cannot be read: {error}") from None
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise ModelError(f"{file}: has no r and lora_alpha, as an adapter of LoRA has")
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    found = {}
    for name, low_RI in weights.items():
        if name.endswith("lora_A.weight"):
            high_OR = weights[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            found[target] = scale * high_OR.float() @ low_RI.float()
    return found


def adapter_scale(folder: Path) -> float:
    """lora_alpha / r of an adapter."""
    file = folder / ADAPTER_CONFIG
    settings = parse_object(read_text(file).encode(), str(file))
    return float(settings["lora_alpha"]) / float(settings["r"])
