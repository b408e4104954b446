"""Hypotheses on weights and arithmetic: another number format, another checkpoint. `catalogue.yaml` names them.

Each changes a copy of the model in place, and returns it; None where it does not apply. Formats of few bits are those
of `model.quantize`, which are held to vLLM's own.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrl.artifacts.files import parse_object, read_text
from tailrl.config.sampler import SamplerSettings
from tailrl.explanation.inputs import Context
from tailrl.model.policy import load_policy
from tailrl.model.quantize import rounded_weight
from tailrl.model.quantized import projections, round_activations
from tailrl.runtime.errors import StudyError

LOGITS_TOO = "explained_logits_too"  # the attribute of a model in 16 bits whose head computes in them too
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def dtype(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001 - the interface of all
    """Weights and activations in another number format, logits in float32; with `_logits` logits too."""
    setattr(model, LOGITS_TOO, value.endswith("_logits"))
    return model.to(getattr(torch, value.removesuffix("_logits")))


def weights_dtype(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001
    """Weights rounded to another number format; computed in the model's own."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(getattr(torch, value)))
    return model


def quantized(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel | None:  # noqa: ARG001
    """Linear layers in few bits: int8, fp8, int4, or int4_N with N inputs to a scale.

    `_weights`: activations stay. Where they meet another arithmetic, their rounding is noise that none repeats, and the
    weights' part is what can be predicted. `_stored`: likewise, with scales as compressed-tensors stores them.
    """
    kind, *rest = value.split("_")
    group = next((int(part) for part in rest if part.isdigit()), None)
    settings = SamplerSettings(quantization=kind, group_size=group)
    names = projections(model)
    for name, weight in model.named_parameters():
        if name in names:
            if group and weight.shape[-1] % group:
                return None
            weight.copy_(_stored(weight, kind, group) if "stored" in rest else rounded_weight(weight, settings))
    if not {"weights", "stored"} & {*rest}:
        round_activations(model, settings)
    return model


def _stored(weight_OI: Tensor, kind: str, group: int | None) -> Tensor:
    """A weight as compressed-tensors stores one in bfloat16: a scale is the largest number over half the range."""
    bits = int(kind.removeprefix("int"))
    grouped_OGN = weight_OI.bfloat16().view(len(weight_OI), -1, group or weight_OI.shape[-1])
    scale_OG1 = (grouped_OGN.abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)).clamp(min=1e-12)
    level_OGN = (grouped_OGN / scale_OG1).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (level_OGN.float() * scale_OG1.float()).view(weight_OI.shape).to(weight_OI.dtype)


def cache(model: PreTrainedModel, value: str, context: Context) -> PreTrainedModel:  # noqa: ARG001
    """Keys and values in float8."""
    round_activations(model, SamplerSettings(kv_cache_dtype=value))
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
    weights = dict(other.state_dict())
    own = model.state_dict()
    if {name: weight.shape for name, weight in weights.items()} != {n: w.shape for n, w in own.items()}:
        raise StudyError(f"{context.others[int(value)]}: its weights do not have the shapes of the model's")
    model.load_state_dict(weights)
    return model


def adapter(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel | None:
    """The model plus a multiple of the given adapter: 1 merges it, -1 takes it out of merged weights."""
    if not context.adapters:
        return None
    parameters = dict(model.named_parameters())
    for name, update in adapter_updates(Path(context.adapters[0])).items():
        if name not in parameters or parameters[name].shape != update.shape:
            raise StudyError(f"{context.adapters[0]}: the model has no weight {name} of the shape {list(update.shape)}")
        parameters[name].add_(value * update.to(parameters[name].dtype))
    return model


def adapter_updates(folder: Path) -> dict[str, Tensor]:
    """What an adapter of PEFT (LoRA) adds to each weight, by the weight's name; raises StudyError for any other."""
    file = folder / ADAPTER_CONFIG
    settings = parse_object(read_text(file).encode(), str(file))
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except Exception as error:  # the library has its own
        raise StudyError(f"{folder / ADAPTER_WEIGHTS}: cannot be read: {error}") from None
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise StudyError(f"{file}: has no r and lora_alpha, as an adapter of LoRA has")
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
