"""Model folders: a tiny Llama's, one of its files damaged."""

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from kinds import Case, Kind
from mutations import HOSTILE, mutated, mutated_bytes, to_json
from transformers.utils import logging

from tailrl.config.policy import ScratchPolicy
from tailrl.model.policy import (
    check_vocabulary,
    create_policy,
    encode_prompt,
    load_config,
    load_policy,
    load_tokenizer,
    save_policy,
)
from tailrl.model.tokenizer import train_tokenizer
from tailrl.model.tokenizer_trial import try_tokenizer

logging.disable_progress_bar()
logging.set_verbosity(logging.CRITICAL)

SIZES = {"vocabulary_size": 300, "hidden_size": 8, "layers": 1, "heads": 2, "intermediate_size": 8, "max_length": 64}
WEIGHTS, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
JSON = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
WORDS = (
    *("llama", "qwen3", "gpt2", "BPE", "WordPiece", "Unigram", "Sequence", "Regex"),
    *("float16", "F64", "BF16", "silu", "</s>"),
)
KEYS: dict[str, Any] = {
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "chat_template": "{{ messages[0].content }}",
    "auto_map": {"AutoConfig": "x.X"},
    "tokenizer_class": "LlamaTokenizer",
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention"],
    "sliding_window": 4,
}


def prepare(folder: Path) -> None:
    tokenizer = train_tokenizer(SIZES["vocabulary_size"], ["1+1"])
    save_policy(create_policy(ScratchPolicy.model_construct(**SIZES), tokenizer, 0), tokenizer, folder)
    # In parts, so that the index is read too.
    (folder / "model.safetensors").rename(folder / WEIGHTS)
    header, body = _parts((folder / WEIGHTS).read_bytes())
    names = [name for name in header if name != "__metadata__"]
    index = {"metadata": {"total_size": len(body)}, "weight_map": dict.fromkeys(names, WEIGHTS)}
    (folder / INDEX).write_bytes(to_json(index))


def _parts(weights: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    length = struct.unpack("<Q", weights[:8])[0]
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def cases(rng: Random) -> Iterator[Case]:
    """Values of the JSON files and of the weights' header, and bytes of all of them."""
    with tempfile.TemporaryDirectory() as there:
        prepare(Path(there))
        data = {path.name: path.read_bytes() for path in Path(there).iterdir()}
    known = {name: json.loads(data[name]) for name in (*JSON, INDEX)}
    # A JSON file of the vocabulary alone hides the rest from the damage.
    known["tokenizer.json"]["model"]["merges"] = known["tokenizer.json"]["model"]["merges"][:5]
    header, body = _parts(data[WEIGHTS])
    while True:
        name = rng.choice((*JSON, WEIGHTS, WEIGHTS, INDEX))
        if name == WEIGHTS and rng.random() < 0.7:
            changed = to_json(mutated(header, rng, (*HOSTILE, *WORDS)))
            size = len(changed) if rng.random() < 0.95 else rng.choice((0, 2**62, 10**8, len(changed) - 1))
            yield name, struct.pack("<Q", size) + changed + body
        elif name != WEIGHTS and rng.random() < 0.7:
            more = {key: KEYS[key] for key in rng.sample(list(KEYS), rng.choice((0, 0, 0, 1)))}
            share = rng.choice((1, 1, 1, 1, 1, 1, 1, 0.8, 0.3))  # what a configuration lacks, transformers fills in
            kept = {key: value for key, value in known[name].items() if key == "model_type" or rng.random() < share}
            yield name, to_json(mutated({**kept, **more}, rng, (*HOSTILE, *WORDS)))
        else:
            yield name, mutated_bytes(data[name], rng)


def read(folder: Path, name: str) -> None:  # noqa: ARG001 - one folder, whichever file is damaged
    """As a study's first job does, and an evaluation of the model as it is."""
    load_config(folder)
    tokenizer = load_tokenizer(folder)
    model = load_policy(folder)
    check_vocabulary(model.config, tokenizer, folder)
    encode_prompt(tokenizer, "What is 1+1?")


KIND = Kind("models", prepare, cases, read, first=lambda folder: try_tokenizer(str(folder)))
