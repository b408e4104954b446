"""Checks of a pretrained model: possible sizes, files that fit the configuration, finite weights, packed rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from tailrl.kernels.packing import pack
from tailrl.model.files import MisfitError, file_of
from tailrl.model.forward import PACKED_ATTENTION, head_weight, hidden_states, trained_length
from tailrl.runtime.errors import ModelError, one_line, reason

LENGTHS = (3, 5)
"""Tokens of the two sequences that are tried in one row."""

ROUNDING_SHARE = 2.0**-18
"""Accepted difference per layer, as a share of the largest hidden state: 64 roundings of float32. Correct families of
two layers differ by 4e-7 at most; the least mixing of tokens found, by a convolution at its random start, is 2e-4."""

AMPLIFIED = 4.0
"""Accepted difference in units of that of the library's own two attentions, where that is more: layers can amplify
rounding. A SmolLM2-135M whose training fell apart differed by 2e-4 of its largest hidden state, in both."""

BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias")
"""Ends of names in older files of what is no weight."""

MOST_PARTS = 2048
"""Layers, heads or experts. A configuration may name 10^9, which would take days: 2,000 layers take four seconds."""

PACKED_IN_BYTE = 8
"""Most weights that a byte of a quantized file can hold: bits. Elsewhere a byte holds one weight at most (float8)."""

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""What every policy's configuration must say."""

SPARE = 2**26
"""Numbers of a model that need not come from its files, such as a mask in its buffers: 256 MiB."""


def refuse_endless(path: str | Path) -> None:
    """Raises MisfitError where the configuration counts more layers, heads or experts than any model has."""
    file = cached_file(path, CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    blocks = [json.loads(Path(file).read_text(encoding="utf-8"))] if file else []
    for block in blocks:
        for key, value in block.items() if isinstance(block, dict) else ():
            if isinstance(value, dict):
                blocks.append(value)
            elif isinstance(value, int) and value > MOST_PARTS and any(w in key for w in ("layer", "head", "expert")):
                raise MisfitError(f"{CONFIG_NAME}: {key} is {one_line(value)}, more than {MOST_PARTS}")


def refuse_composite(path: str | Path) -> None:
    """Raises MisfitError for the configuration of several models, such as of text and of images.

    It has none of the sizes of a text model at its top, and each code that needs one would fail in its own place.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.get_text_config() is not config:
        parts = ", ".join(sorted(name for name in config.sub_configs if hasattr(config, name)))
        absent = ", ".join(name for name in SIZES if not hasattr(config, name))
        lacking = f"no {absent}" if absent else "not the sizes of a text model"
        raise MisfitError(
            f"{CONFIG_NAME} is that of several models ({config.model_type}: {parts}) and has {lacking} at its top; "
            "only models of text alone are trained"
        )


def refuse_pickle(path: str | Path) -> None:
    """Raises MisfitError where an index of safetensors names a file of another kind, loaded as a pickle otherwise."""
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    parts = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else ()
    for part in parts:
        if not str(part).endswith(".safetensors"):
            raise MisfitError(f"{SAFE_WEIGHTS_INDEX_NAME} names {part}, which is not a safetensors file")


def refuse_oversized(path: str | Path) -> None:
    """Raises MisfitError where the configuration asks for more numbers than the safetensors files can hold.

    A configuration without sizes gets transformers' defaults, those of a large model. Memory for all of them would be
    taken before the files are seen to lack them. The numbers are counted on torch's meta device, which takes none.
    """
    whole = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    files = [Path(part) for part in ([whole] if whole else get_checkpoint_shard_files(path, index)[0] if index else [])]
    if not files or not all(file.is_file() for file in files):  # loading says so
        return
    size = sum(file.stat().st_size for file in files)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION, trust_remote_code=False)
    asked = sum(part.numel() for part in (*model.parameters(), *model.buffers()))
    held = size * (PACKED_IN_BYTE if getattr(config, "quantization_config", None) else 1)
    if asked > held + SPARE:
        raise MisfitError(f"{CONFIG_NAME} asks for {asked:,} weights, too many for its files of {size:,} bytes")


def check_loaded(model: PreTrainedModel, report: dict[str, Any], path: str | Path) -> None:
    """Raises StudyError where files and configuration do not fit, a weight is not finite, or packed rows go wrong.

    `report` is transformers' own on the loading, which goes on with random values or without what it does not know.
    """
    folder = Path(cached_file(path, CONFIG_NAME)).parent
    unknown = [name for name in report["unexpected_keys"] if not name.endswith(BUFFERS)]
    for names, fault in ((report["missing_keys"], "lacks"), (unknown, "has weights without a place in the model:")):
        if names:
            listed = one_line(", ".join(sorted(names)))
            raise ModelError(f"{path}: by {CONFIG_NAME}, {file_of(folder, min(names))} {fault} {listed}")
    if report["mismatched_keys"]:
        name, given, expected = min(report["mismatched_keys"])
        raise ModelError(
            f"{path}: {file_of(folder, name)}: {name} has the shape {list(given)}, {CONFIG_NAME} says {list(expected)}"
        )
    for name, weight in model.named_parameters():
        # A sum is not finite where a term is not.
        if not weight.sum(dtype=torch.float64).isfinite():
            raise ModelError(f"{path}: {file_of(folder, name)}: {name} holds NaN or Inf")
    _check_forward(model, path)
    if missing := [name for name in SIZES if not hasattr(model.config, name)]:
        raise ModelError(f"{path}: {CONFIG_NAME} has no {', '.join(missing)}")
    _check_far(model, path)


@torch.no_grad()
def _check_forward(model: PreTrainedModel, path: str | Path) -> None:
    """Raises StudyError where the model's class does not suit packed rows, or logits are not head times hidden state.

    Two sequences in one row are compared with each alone in the library's own attention: anything else that mixes
    tokens, such as a recurrence or a convolution, would let packed responses see one another.
    """
    kind = type(model).__name__
    tokens_P = torch.arange(sum(LENGTHS)) % model.config.vocab_size
    try:
        row_PH = hidden_states(model, tokens_P, pack(LENGTHS))
        alone_PH = _alone(model, tokens_P, "eager")
        own_PV = model(input_ids=tokens_P[None, : LENGTHS[0]], use_cache=False).logits[0]
        ours_PV = alone_PH[: LENGTHS[0]] @ head_weight(model).T
        difference, size = (row_PH - alone_PH).abs().max().item(), alone_PH.abs().max().item()
        accepted = ROUNDING_SHARE * model.config.num_hidden_layers * size
        if difference > accepted:
            accepted = max(accepted, AMPLIFIED * _rounding(model, tokens_P, alone_PH))
        model.set_attn_implementation(PACKED_ATTENTION)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except Exception as error:  # each class fails in its own way
        raise ModelError(f"{path}: {kind} does not run on packed rows: {reason(error)}") from None
    if not difference <= accepted:  # NaN is refused; hidden states of nothing but 0 are equal
        raise ModelError(
            f"{path}: {kind} mixes tokens by more than its attention: packed responses would see one another (hidden "
            f"states of size {size:.1g} differ by {difference:.1g}; rounding explains {accepted:.1g})"
        )
    if not torch.allclose(own_PV, ours_PV, rtol=1e-4, atol=1e-4, equal_nan=True):
        raise ModelError(f"{path}: its logits are scaled or capped after the head, which is not supported")


@torch.no_grad()
def _check_far(model: PreTrainedModel, path: str | Path) -> None:
    """Raises StudyError where a sequence at the model's last positions changes a short one in its row.

    Only what depends on positions, as a rope, can do so, for both have the lengths that `_check_forward` tried.
    """
    tokens_P = torch.arange(sum(LENGTHS)) % model.config.vocab_size
    near, shift = pack(LENGTHS), max(0, trained_length(model.config) - LENGTHS[1])
    second_P = torch.arange(sum(LENGTHS)) >= LENGTHS[0]
    far = replace(near, positions_P=near.positions_P + shift * second_P)
    near_LH, far_LH = (hidden_states(model, tokens_P, packing)[: LENGTHS[0]] for packing in (near, far))
    if not torch.allclose(near_LH, far_LH, rtol=0, atol=ROUNDING_SHARE * near_LH.abs().max().item()):
        raise ModelError(
            f"{path}: {type(model).__name__} gives a response other numbers beside one of "
            f"{trained_length(model.config)} tokens: packed responses would see one another's length"
        )


def _alone(model: PreTrainedModel, tokens_P: Tensor, attention: str) -> Tensor:
    """Last hidden states [P, H] of the two sequences, each alone in the library's own attention of this name."""
    model.set_attn_implementation(attention)
    parts = [model.base_model(input_ids=part[None], use_cache=False) for part in torch.split(tokens_P, list(LENGTHS))]
    return torch.cat([output.last_hidden_state[0] for output in parts])


def _rounding(model: PreTrainedModel, tokens_P: Tensor, alone_PH: Tensor) -> float:
    """The largest difference of the library's two attentions, which part by rounding alone; 0 where it has one."""
    try:
        return float((_alone(model, tokens_P, "sdpa") - alone_PH).abs().max())
    except ValueError:
        return 0.0
