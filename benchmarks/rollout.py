"""Tokens per second of the rollout engines beside one another, on the same requests, in one process.

    PYTHONPATH=workflow/scripts python benchmarks/rollout.py --threads 2 --out docs/results/rollout.csv

Two policies: 4 layers of 128 (V = 2,048) with random weights, small ones, so that it is nearly uniform and a response
almost always runs to its limit; and, where its package is installed, SmolLM2-135M, of V = 49,152, with as many requests
as an engine has in flight: 128. The engines take turns, after a short run each; the ratio is taken within each round,
then the median. Speed is in sampled tokens alone: prompts are work, not output.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import smollm2
from table import ratios, show

if TYPE_CHECKING:
    from tailrl.rollout.types import Request

ENGINES = {
    "exact float32": {"engine": "exact", "dtype": "float32"},
    "transformers float32": {"engine": "transformers", "dtype": "float32"},
    "transformers bfloat16": {"engine": "transformers", "dtype": "bfloat16"},
    "vLLM bfloat16": {"engine": "vllm", "dtype": "bfloat16"},
    "vLLM float32": {"engine": "vllm", "dtype": "float32"},
}
BASE = "exact float32"


@dataclass(frozen=True)
class Load:
    """What is sampled: `group` requests to each prompt, all lengths in tokens."""

    make_policy: Callable[[Path], None]
    prompts: int
    group: int
    prompt: int
    new_tokens: int


def save_small(folder: Path) -> None:
    """A policy of 4 layers of 128 with random weights, as a Hugging Face folder."""
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


LOADS = {
    "4 layers of 128": Load(save_small, prompts=32, group=8, prompt=16, new_tokens=40),
    "SmolLM2-135M": Load(partial(smollm2.save, shots=None), prompts=16, group=8, prompt=16, new_tokens=24),
}


def make_requests(load: Load, vocabulary: int, log_rho: float | None) -> list["Request"]:
    """Groups of requests with a prompt of its own each, as a training step has them."""
    import numpy as np

    from tailrl.rollout.types import Request

    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, vocabulary, load.prompt).tolist()) for _ in range(load.prompts)]
    return [
        Request(prompt, 1000 * place + member, log_rho or 0.0)
        for place, prompt in enumerate(prompts)
        for member in range(load.group)
    ]


def measure(policy: str, load: Load, folder: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    from tailrl.config.sampler import SamplerSettings
    from tailrl.model.policy import load_policy, named_weights
    from tailrl.rollout import Decoding, make_sampler

    load.make_policy(folder)
    model = load_policy(folder)
    requests = make_requests(load, model.config.vocab_size, arguments.log_rho)
    rule = "full" if arguments.log_rho is None else "min_p"
    decoding = Decoding(1.0, load.new_tokens, rule)
    samplers = {
        name: make_sampler(SamplerSettings.model_validate(ENGINES[name]), folder, load.prompt + load.new_tokens, 0)
        for name in arguments.engines
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
    return [
        {
            "policy": policy,
            "engine": name,
            "threads": arguments.threads,
            "rule": "full" if arguments.log_rho is None else f"min_p, rho = e^{arguments.log_rho:g}",
            "requests": len(requests),
            "repeats": arguments.repeats,
            "tokens_per_second": round(statistics.median(speeds[name])),
            **ratios("exact_over_this", speeds[BASE], speeds[name]),
        }
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    installed = [name for name in ENGINES if not name.startswith("vLLM") or find_spec("vllm")]
    possible = [name for name in LOADS if name != "SmolLM2-135M" or smollm2.is_installed()]
    usual = [name for name in installed if name != "vLLM float32"]
    parser.add_argument("--policies", nargs="+", choices=possible, default=possible)
    parser.add_argument("--engines", nargs="+", choices=installed, default=usual, help=f"{BASE} must be among them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--log-rho", type=float, help="ln of min-p's threshold; without it all tokens are kept")
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    if BASE not in arguments.engines:
        parser.error(f"--engines: {BASE} is what the others are compared with")
    # Before torch and vLLM are imported: both read it once.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    rows = []
    for policy in arguments.policies:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(policy, LOADS[policy], Path(folder), arguments)
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
