"""Which file of a model is at fault: libraries that read several of them at once seldom say."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from tailrl.runtime.errors import one_line, reason

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json")

OLDER_KEYS = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
"""The names in transformers 4 of rope_theta and partial_rotary_factor, where they are others."""


class MisfitError(ValueError):
    """A file of a model can be read, and says what no model here can be; the message names the file."""


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError, which names the file, for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {reason(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return content


def broken_file(folder: Path) -> str | None:
    """The file of a model that cannot be read alone, and why; None where each can.

    Tried in this order: the configuration, the index of the weights, the headers of their files, the JSON of the
    tokenizer. A tokenizer is not loaded, since that may never end: see `tokenizer_trial`.
    """
    try:
        _try_config(folder)
        _try_weights(folder)
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                read_object(folder / name)
    except ValueError as error:
        return str(error)
    return None


def _try_config(folder: Path) -> None:
    """Raises ValueError for a configuration that is not read, or of a model that is no causal language model."""
    content = read_object(folder / CONFIG_NAME)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each class fails in its own way
        raise ValueError(f"{CONFIG_NAME}: {reason(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = one_line(repr(content.get("model_type")))
        raise ValueError(f"{CONFIG_NAME}: transformers has no causal language model of model_type {kind}")


def _try_weights(folder: Path) -> None:
    """Raises ValueError for an index without its map, or a file of weights whose header cannot be read."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        files = read_object(folder / SAFE_WEIGHTS_INDEX_NAME).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f"{SAFE_WEIGHTS_INDEX_NAME} has no weight_map from weights to files")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file.name}: {reason(error)}") from None


def add_older_keys(folder: Path) -> None:
    """Add to a policy that transformers 5 wrote what transformers 4 reads instead, so that both read the same model.

    transformers 5 has the rope in `rope_parameters` alone. transformers 4 does not know this key, and would take its
    own default, 10,000, for rope_theta without a word. The new names in tokenizer_config.json are errors to it.
    """
    config = read_object(folder / CONFIG_NAME)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        config["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
        names = OLDER_KEYS.get(config["model_type"], ("rope_theta", "partial_rotary_factor"))
        for name, key in zip(names, ("rope_theta", "partial_rotary_factor"), strict=True):
            if key in rope:
                config[name] = rope[key]
    if {"full_attention", "sliding_attention"} <= rope.keys():  # Gemma 3's two ropes
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if "num_local_experts" in config:  # Qwen3-MoE's; transformers 4 would build its 128
        config["num_experts"] = config["num_local_experts"]
    _write_object(folder / CONFIG_NAME, config)
    if not (folder / TOKENIZER_CONFIG).is_file():
        return
    tokenizer = read_object(folder / TOKENIZER_CONFIG)
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    _write_object(folder / TOKENIZER_CONFIG, tokenizer)


def _write_object(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def file_of(folder: Path, weight: str) -> str:
    """The name of the file that holds a weight, or of the index that should say so."""
    if not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return str(SAFE_WEIGHTS_NAME)
    files: dict[str, str] = read_object(folder / SAFE_WEIGHTS_INDEX_NAME)["weight_map"]
    return files.get(weight, str(SAFE_WEIGHTS_INDEX_NAME))
