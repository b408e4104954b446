"""One step of a training loop: vLLM samples with its defaults, PyTorch scores, and both sides' log-probs are logged.

python examples/one_step.py MODEL PROMPTS LOG [--generation-config vllm]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RESPONSES, TOKENS = 64, 40


def sample(model: str, prompts: list[list[int]], generation_config: str) -> list[dict[int, float]]:
    """A response to each prompt, with vLLM's own defaults: a list of (token id, log-prob in nats)."""
    from vllm import LLM

    engine = LLM(
        model,
        dtype="bfloat16",
        logprobs_mode="processed_logprobs",
        generation_config=generation_config,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        max_model_len=128,
        seed=0,
    )
    settings = engine.get_default_sampling_params()
    settings.max_tokens, settings.logprobs = TOKENS, 0
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings)
    return [
        [(token, place[token].logprob) for token, place in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


@torch.no_grad()
def score(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """The trainer's log-probs of a response, nats."""
    logits_PV = model(torch.tensor([prompt + tokens])).logits[0]
    logp_TV = logits_PV[len(prompt) - 1 : -1].log_softmax(-1)
    return logp_TV[range(len(tokens)), tokens].tolist()


def main() -> None:
    """Write the log of a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--generation-config", default="auto", help="vLLM's own default: the model's folder decides")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    lines = given.prompts.read_text(encoding="utf-8").splitlines()[:RESPONSES]
    prompts = [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False) for line in lines]
    responses = sample(given.model, prompts, given.generation_config)
    trainer = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    with given.log.open("w", encoding="utf-8") as log:
        for prompt, response in zip(prompts, responses, strict=True):
            tokens = [token for token, _ in response]
            row = {
                "prompt": prompt,
                "token_ids": tokens,
                "sampler_logprobs": [logprob for _, logprob in response],
                "trainer_logprobs": score(trainer, prompt, tokens),
                "text": tokenizer.decode(tokens),
            }
            log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
