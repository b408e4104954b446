"""Tokens per second of the exact engine beside vLLM's, on the same requests, in one process.

    python benchmarks/rollout.py --threads 2 --out docs/results/rollout.csv

The policy has the default study's shape and random weights, small ones, so that it is nearly uniform and a response
almost always runs to its limit. Both engines hold 128 sequences at most. They take turns, after a short run each; the
ratio is taken within each round, then the median. Speed is in sampled tokens alone: prompts are work, not output.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from table import show

VLLM_DTYPES = ("bfloat16", "float32")


def make_policy(folder: Path) -> None:
    """The default study's policy with random weights, as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_requests(arguments: argparse.Namespace, vocabulary: int) -> list:
    """Groups of requests with a prompt of its own each, as a training step has them."""
    import numpy as np

    from tailrl.records import Request

    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, vocabulary, arguments.prompt).tolist()) for _ in range(arguments.prompts)]
    return [
        Request(prompt, 1000 * place + member, arguments.log_rho or 0.0)
        for place, prompt in enumerate(prompts)
        for member in range(arguments.group)
    ]


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    from tailrl.policy import load_policy, named_weights
    from tailrl.rollout import Decoding, make_sampler
    from tailrl.settings import SamplerSettings

    model = load_policy(folder)
    requests = make_requests(arguments, model.config.vocab_size)
    rule = "full" if arguments.log_rho is None else "min_p"
    decoding = Decoding(1.0, arguments.new_tokens, rule)
    settings = {"exact float32": SamplerSettings(engine="exact", dtype="float32")}
    settings |= {f"vLLM {dtype}": SamplerSettings(dtype=dtype) for dtype in arguments.vllm}
    samplers = {
        name: make_sampler(setting, folder, arguments.prompt + arguments.new_tokens, 0)
        for name, setting in settings.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in samplers}
    for sampler in samplers.values():
        sampler.load_weights(named_weights(model))
        sampler.generate(requests[:16], Decoding(1.0, 4, rule))
    names = list(samplers)
    for turn in range(arguments.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            rollouts = samplers[name].generate(requests, decoding)
            speeds[name].append(sum(len(rollout.tokens) for rollout in rollouts) / (time.perf_counter() - start))
    return [row(name, speeds, arguments) for name in names]


def row(name: str, speeds: dict[str, list[float]], arguments: argparse.Namespace) -> dict[str, object]:
    ratios = [mine / exact for mine, exact in zip(speeds[name], speeds["exact float32"], strict=True)]
    return {
        "engine": name,
        "threads": arguments.threads,
        "rule": "full" if arguments.log_rho is None else f"min_p, rho = e^{arguments.log_rho:g}",
        "requests": arguments.prompts * arguments.group,
        "repeats": arguments.repeats,
        "tokens_per_second": round(statistics.median(speeds[name])),
        "most": round(max(speeds[name])),
        "exact_over_this": round(1 / statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--policy", type=Path, help="a Hugging Face folder; by default the default study's shape")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="requests that share a prompt")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--log-rho", type=float, help="ln of min-p's threshold; without it all tokens are kept")
    parser.add_argument("--vllm", nargs="*", choices=VLLM_DTYPES, default=["bfloat16"])
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    # Before torch and vLLM are imported: both read it once.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.policy is None:
            make_policy(Path(folder))
        rows = measure(arguments, arguments.policy or Path(folder))
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
