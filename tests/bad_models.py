"""Models that cannot be used: how to spoil a folder that is well, and what the sentence about it must name."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file


def write(file: Path, content: str | bytes) -> Path:
    """The file, with this content."""
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def _cut(file: str, to: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / file).write_bytes((model / file).read_bytes()[:to])

    return change


def _delete(*files: str) -> Callable[[Path], None]:
    return lambda model: [(model / file).unlink() for file in files] and None


def _replace(file: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda model: write(model / file, content) and None


def _set(file: str, **values: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        data = json.loads((model / file).read_text(encoding="utf-8"))
        write(model / file, json.dumps(data | values))

    return change


def _pickle_instead(model: Path) -> None:
    """A pickle that leaves a trace where it is loaded."""
    trace = model / "loaded"
    code = b"cposix\nsystem\n(S'touch " + str(trace).encode() + b"'\ntR."
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(code)


def _index(part: str) -> Callable[[Path], None]:
    """The weights in a part of that name, which is not there or a pickle."""

    def change(model: Path) -> None:
        _pickle_instead(model)
        index = {"metadata": {}, "weight_map": {"model.norm.weight": part}}
        write(model / "model.safetensors.index.json", json.dumps(index))

    return change


def _index_of_nothing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    write(model / "model.safetensors.index.json", "[]")


def _smaller_model(model: Path) -> None:
    """A model that is whole, beside the tokenizer of a larger one."""
    weights = load_file(model / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(weights | {name: weights[name][:500].contiguous()}, model / "model.safetensors", {"format": "pt"})
    _set("config.json", vocab_size=500)(model)


def _remote_code(model: Path) -> None:
    """A model class of the folder's own, whose module leaves a trace where it is imported."""
    _set("config.json", model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})(model)
    write(model / "own.py", f"open({str(model / 'loaded')!r}, 'w')\nclass Own: ...\n")


def _lying_header(model: Path) -> None:
    """A header that is longer than the file."""
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


MODELS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, ("model", "there is no such folder")),
    "no tokenizer": (_delete("tokenizer.json", "tokenizer_config.json"), ("model", "no tokenizer")),
    "a tokenizer cut short": (_cut("tokenizer.json", 1000), ("model", "no tokenizer")),
    "a tokenizer that is a list": (_replace("tokenizer.json", "[]"), ("model", "no tokenizer")),
    "a tokenizer without an end": (_set("tokenizer_config.json", eos_token=None), ("model", "no end token")),
    "no configuration": (_delete("config.json"), ("model", "config")),
    "a configuration cut short": (_cut("config.json", 50), ("model", "config")),
    "a configuration that is a list": (_replace("config.json", "[1]"), ("model", "config")),
    "a configuration of nothing": (_replace("config.json", "{}"), ("model", "model_type")),
    "an unknown architecture": (_set("config.json", model_type="nothing"), ("model", "nothing")),
    "a width in words": (_set("config.json", hidden_size="wide"), ("model", "hidden_size", "wide")),
    "a width of zero": (_set("config.json", num_attention_heads=0), ("model",)),
    "an encoder": (_set("config.json", model_type="t5", architectures=["T5Model"]), ("model",)),
    "code of its own": (_remote_code, ("model", "code of its own")),
    "no weights": (_delete("model.safetensors"), ("model", "safetensors")),
    "a pickle in place of safetensors": (_pickle_instead, ("model", "safetensors")),
    "weights cut short": (_cut("model.safetensors", 5000), ("model",)),
    "weights of no byte": (_cut("model.safetensors", 0), ("model",)),
    "weights with a header that lies": (_lying_header, ("model",)),
    "weights that are HTML": (_replace("model.safetensors", "<html>not found</html>"), ("model",)),
    "a layer that is missing": (_set("config.json", num_hidden_layers=3), ("model", "lack", "layers.2")),
    "weights of another size": (_set("config.json", intermediate_size=128), ("model", "mlp")),
    "a vocabulary of another size": (_set("config.json", vocab_size=500), ("model", "embed_tokens", "500")),
    "a tokenizer with more tokens than the model": (_smaller_model, ("model", "600", "vocab_size", "500")),
    "a part that is not there": (_index("nowhere.safetensors"), ("model", "nowhere.safetensors")),
    "a part that is a pickle": (_index("pytorch_model.bin"), ("model", "pytorch_model.bin")),
    "an index that is a list": (_index_of_nothing, ("model",)),
}
