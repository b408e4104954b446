"""The policy: made, read, written, and run on packed rows, backbone and head apart."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from tailrl.config.policy import ScratchPolicy
from tailrl.kernels.packing import pack
from tailrl.model.forward import PACKED_ATTENTION, head_weight, hidden_states
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError, one_line, reason
from tailrl.tasks.problem import Problem


def create_policy(settings: ScratchPolicy, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Llama with random float32 weights, deterministic under `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=PACKED_ATTENTION,
    )
    return LlamaForCausalLM(config)


def load_policy(path: str | Path) -> PreTrainedModel:
    """A causal language model in float32, ready for packed rows; raises StudyError where it cannot be read whole.

    Weights come from safetensors alone, for a pickle can run code, and the model's class from transformers.
    """
    try:
        _refuse_pickle(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed below by name
            use_safetensors=True,
            trust_remote_code=False,
        )
    # A configuration may ask for any class with any sizes: each fails in a way of its own.
    except Exception as error:
        raise StudyError(f"{path}: no model could be read from it: {_why(path, error)}") from None
    # transformers would go on with random values in the place of both.
    if report["missing_keys"]:
        raise StudyError(f"{path}: the model's files lack {one_line(', '.join(sorted(report['missing_keys'])))}")
    if report["mismatched_keys"]:
        name, given, expected = min(report["mismatched_keys"])
        raise StudyError(f"{path}: {name} has the shape {list(given)}, and not the configuration's {list(expected)}")
    _check_head(model, path)
    return cast(PreTrainedModel, model)


def _refuse_pickle(path: str | Path) -> None:
    """Raises ValueError where an index of safetensors names another file: transformers would load it as a pickle."""
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    parts = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else ()
    for part in parts:
        if not str(part).endswith(".safetensors"):
            raise ValueError(f"{SAFE_WEIGHTS_INDEX_NAME} names {part}, which is not a file of safetensors")


def _why(path: str | Path, error: Exception) -> str:
    if Path(path).is_absolute() and not Path(path).is_dir():
        return "there is no such folder"
    if "trust_remote_code" in str(error):
        return "it needs code of its own, and code that comes with a model is not run"
    return reason(error)


@torch.no_grad()
def _check_head(model: PreTrainedModel, path: str | Path) -> None:
    """Raises StudyError where the model's logits are more than head times hidden state (a scale, a soft cap)."""
    tokens_P, packing = torch.arange(4) % model.config.vocab_size, pack([4])
    own_PV = model(
        input_ids=tokens_P[None], position_ids=packing.positions_P[None], use_cache=False, packing=packing
    ).logits[0]
    ours_PV = hidden_states(model, tokens_P, packing) @ head_weight(model).T
    if not torch.allclose(own_PV, ours_PV, rtol=1e-4, atol=1e-4, equal_nan=True):
        raise StudyError(f"{path}: its logits are scaled or capped after the head, which the objective does not know")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a policy; raises StudyError where there is none or it has no end token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # Its files are JSON of many makes, read without a schema.
    except Exception as error:
        raise StudyError(f"{path}: no tokenizer could be read from it: {_why(path, error)}") from None
    if tokenizer.eos_token_id is None:
        raise StudyError(f"{path}: its tokenizer has no end token, so that no response could ever end")
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_config(path: str | Path) -> PreTrainedConfig:
    """The configuration beside a policy; raises StudyError where there is none that transformers knows."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise StudyError(f"{path}: no configuration could be read from it: {_why(path, error)}") from None


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raises StudyError where the tokenizer has tokens that the model does not have."""
    if len(tokenizer) > config.vocab_size:
        raise StudyError(
            f"{path}: its tokenizer has {len(tokenizer)} tokens, more than the model's vocab_size, {config.vocab_size}"
        )


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Weights (safetensors), configuration and tokenizer as an ordinary Hugging Face folder.

    The weights are the model's own, which is then not sharded, or as `whole_weights` gave them. Raises StudyError where
    the disk is full or refuses.
    """
    try:
        model.save_pretrained(folder, state_dict=whole_weights(model) if weights is None else weights)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # each library that writes has a kind of its own: OSError, SafetensorError, Exception
        raise StudyError(f"{folder}: the policy could not be written: {reason(error)}") from None


def whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight by its name, whole, on the first rank's CPU, a tied head not twice; every rank must ask."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return distributed.on_first((name, weight) for name, weight in model.state_dict().items() if name in once)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a checkpoint, whole and detached: what an engine is handed. A tied head comes too.

    Where the model is sharded, they are put together one at a time, and every rank must ask for all of them.
    """
    for name, weight in model.state_dict().items():
        yield name, distributed.whole(weight)


def required_length(
    problems: Sequence[Problem], prompts: Sequence[Sequence[int]], max_new_tokens: int, config: PreTrainedConfig
) -> int:
    """Longest prompt and response together, tokens; raises StudyError where the policy cannot hold them."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest]) + max_new_tokens
    if length > config.max_position_embeddings:
        raise StudyError(
            f"problem {problems[longest].id!r}: {len(prompts[longest])} prompt tokens and max_new_tokens = "
            f"{max_new_tokens} exceed the {config.max_position_embeddings} that the policy supports"
        )
    return length


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt: through the chat template where the tokenizer has one, plainly otherwise."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return cast(list[int], tokenizer.encode(text, add_special_tokens=False))
    return cast(list[int], tokenizer.encode(prompt))
