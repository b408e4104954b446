"""The policy and its tokenizer: created, loaded and saved."""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from tailrl.config.policy import ScratchPolicy, lacking, lies
from tailrl.model.checks import check_loaded, refuse_composite, refuse_endless, refuse_oversized, refuse_pickle
from tailrl.model.files import TOKENIZER_FILES, MisfitError, add_older_keys, broken_file
from tailrl.model.forward import PACKED_ATTENTION
from tailrl.model.routing import open_routers
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError, ModelError, StorageError, few, one_line, reason, say
from tailrl.runtime.hub import use_cache_without_hub
from tailrl.tasks.problem import Problem

WITHIN_LAYER = re.compile(r"(\.\d+)\..*")  # a weight's name, from the number of its layer on


def create_policy(settings: ScratchPolicy, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Llama, or with experts a Qwen3-MoE, with random float32 weights, deterministic under `seed`."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "max_position_embeddings": settings.max_length,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": PACKED_ATTENTION,
    }
    if settings.experts is None:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes,
            head_dim=settings.hidden_size // settings.heads,
            moe_intermediate_size=settings.intermediate_size,
            num_experts=settings.experts,
            num_experts_per_tok=settings.experts_per_token,
            norm_topk_prob=True,
            # Half the time of transformers' loop over the experts, on a CPU too.
            experts_implementation="grouped_mm",
        )
    )
    open_routers(model)
    return model


def load_policy(path: str | Path) -> PreTrainedModel:
    """A causal language model in float32 for packed rows; raises StudyError where it cannot be read whole.

    Weights come from safetensors only, since a pickle can run code. The model's class comes from transformers.
    """
    generation = read_generation(path)
    try:
        refuse_pickle(path)
        refuse_endless(path)
        refuse_composite(path)
        refuse_oversized(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # listed by name in the report
            use_safetensors=True,
            trust_remote_code=False,
        )
    # A configuration may ask for any class of any size, and each fails in its own way.
    except Exception as error:
        raise ModelError(f"{path}: no model could be read from it: {_why(path, error)}") from None
    open_routers(model)
    check_loaded(model, report, path)
    _make_savable(model.generation_config, Path(path) / (GENERATION_CONFIG_NAME if generation else CONFIG_NAME))
    return cast(PreTrainedModel, model)


def read_generation(path: str | Path) -> GenerationConfig | None:
    """The generation_config.json of a policy; None where it has none.

    Of its settings tailrl reads the end tokens alone: the study says how responses are sampled.

    Raises StudyError, which names the file, where transformers cannot read it or an end token is no token id.
    """
    _ask_hub(path)
    try:
        file = cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    except Exception:  # no such folder or model: said where the model itself is read
        return None
    if file is None:
        return None
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not a JSON object")
        generation = GenerationConfig.from_dict(settings)
    except Exception as error:  # its validation fails in many ways
        raise ModelError(f"{file}: cannot be read: {reason(error)}; mend it, or remove it") from None
    ends = generation.eos_token_id
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and (type(token) is not int or token < 0):
            raise ModelError(f"{file}: its eos_token_id holds {one_line(repr(token))}, which is no token id; mend it")
    return generation


def _make_savable(generation: GenerationConfig | None, file: Path) -> None:
    """Unset what transformers refuses to save, such as a temperature without do_sample; says what it was.

    Greedy decoding does not read these settings, and tailrl reads none of them. `file` is where they stand. Raises
    StudyError where more is wrong.
    """
    if generation is None:
        return
    try:
        generation.validate(strict=True)
        return
    except ValueError as error:
        refused = re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)
    for name in refused:
        setattr(generation, name, None)
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise ModelError(f"{file}: transformers refuses to save its settings: {reason(error)}; mend it") from None
    say(
        f"{file}: greedy decoding does not read {few(refused)}, and transformers refuses to save that: policies are "
        "written without it; the study says how responses are sampled"
    )


def _ask_hub(path: str | Path) -> None:
    if not lies(Path.is_dir, path):
        use_cache_without_hub()


def _why(path: str | Path, error: Exception) -> str:
    if Path(path).is_absolute() and not lies(Path.is_dir, path):
        return "there is no such folder"
    if "trust_remote_code" in str(error):
        return "it needs code of its own, and code that comes with a model is not run"
    if isinstance(error, KeyError) and error.args == (PACKED_ATTENTION,):
        return "its class has no attention that packed rows could use"
    if not lies(Path.is_dir, path):
        return f"it is no folder here, and the Hugging Face hub and its cache do not give it: {reason(error)}"
    if isinstance(error, MisfitError):
        return str(error)
    return lacking(Path(path)) or broken_file(Path(path)) or reason(error)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a policy's folder; raises StudyError where there is none or it has no end token."""
    try:
        _ask_hub(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # Its files are JSON of many kinds, read without a schema.
    except Exception as error:
        why = _why(path, error)
        if why == reason(error) and (files := [name for name in TOKENIZER_FILES if (Path(path) / name).is_file()]):
            why = f"{' or '.join(files)}: {why}"
        raise ModelError(f"{path}: no tokenizer could be read from it: {why}") from None
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: its tokenizer has no end token, so no response could ever end")
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_config(path: str | Path) -> PreTrainedConfig:
    """The configuration in a policy's folder; raises StudyError where transformers finds or knows none."""
    try:
        _ask_hub(path)
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{path}: no configuration could be read from it: {_why(path, error)}") from None


def local_folder(path: str | Path) -> Path:
    """The folder of a model that was loaded: the path itself, or where the hub's files lie in the cache."""
    if lies(Path.is_dir, path):
        return Path(path)
    return Path(cached_file(path, CONFIG_NAME)).parent


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raises StudyError where the tokenizer has tokens that the model lacks."""
    if len(tokenizer) > config.vocab_size:
        raise ModelError(
            f"{path}: its tokenizer has {len(tokenizer)} tokens, more than the vocab_size of config.json, "
            f"{config.vocab_size}"
        )


def save_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write weights (safetensors), configuration and tokenizer as an ordinary Hugging Face folder.

    `weights` come from `whole_weights`; None: the model's own, which must not be sharded. The configuration says their
    dtype. Raises StudyError where the disk is full or refuses.
    """
    weights = whole_weights(model) if weights is None else weights
    try:
        model.save_pretrained(folder, state_dict=weights)
        if dtypes := {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {model.dtype}:
            config = copy.deepcopy(model.config)
            config.dtype = str(dtypes.pop()).removeprefix("torch.")  # transformers writes the model's own
            config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        add_older_keys(folder)
    except Exception as error:  # each writing library raises its own kind: OSError, SafetensorError, Exception
        raise StorageError(f"{folder}: the policy could not be written: {reason(error)}") from None


def whole_weights(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every weight by name, whole, on the first rank's CPU, a tied head only once; every rank must call.

    Weights of float32 are rounded to `dtype`, shares before they are gathered.
    """
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    weights = ((name, weight) for name, weight in model.state_dict().items() if name in once)
    return distributed.on_first((n, w.to(dtype) if w.dtype == torch.float32 else w) for n, w in weights)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the model, whole and detached, tied heads included: what an engine loads.

    A sharded model is gathered one weight at a time, and every rank must take all of them.
    """
    for name, weight in model.state_dict().items():
        yield name, distributed.whole(weight)


def checkpoint_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by their names in the model, as the family's checkpoints have them: other names, an expert each.

    transformers knows how, and saves policies in this form. Families whose checkpoints are like the model pass through
    one weight at a time, the others one layer at a time.

    Args:
        model: of the family; its own weights are not read, and may be on the meta device.
        weights: in the model's order, so that those of a layer stand together.
    """
    names = {name: torch.empty_like(weight, device="meta") for name, weight in model.state_dict().items()}
    if revert_weight_conversion(model, names).keys() == names.keys():
        yield from weights
        return
    for _, layer in groupby(weights, lambda named: WITHIN_LAYER.sub(r"\1", named[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def required_length(
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    most: int,
    setting: str,
) -> int:
    """Longest prompt and response together, tokens.

    Raises StudyError, which names the setting that `max_new_tokens` is from, where they exceed `most`: the policy's
    positions, or `trained_length`.
    """
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest]) + max_new_tokens
    if length > most:
        raise ConfigurationError(
            f"problem {problems[longest].id!r}: {len(prompts[longest])} prompt tokens and {setting} = "
            f"{max_new_tokens} exceed the {most} that the policy supports"
        )
    return length


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt, through the tokenizer's chat template if there is one; StudyError where that fails."""
    try:
        if not tokenizer.chat_template:
            return cast(list[int], tokenizer.encode(prompt))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return cast(list[int], tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # a template is a program
        raise ModelError(
            f"{tokenizer.name_or_path}: its tokenizer or chat template fails on a prompt: {reason(error)}; look at its "
            "tokenizer_config.json and chat_template.jinja"
        ) from None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token with which the chat template ends an assistant's turn; None if there is no such token."""
    if not tokenizer.chat_template:
        return None
    said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "the answer"}]
    try:
        _, found, rest = tokenizer.apply_chat_template(said, tokenize=False).rpartition(said[1]["content"])
        after = cast(list[int], tokenizer.encode(rest.lstrip(), add_special_tokens=False)) if found else []
    except Exception:  # a template is a program, and may know no assistant
        return None
    token = tokenizer.added_tokens_decoder.get(after[0]) if after else None
    return after[0] if token is not None and token.special else None
