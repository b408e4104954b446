"""Policies and requests for the tests of the exact engine, and the comparison with the trainer that they all make."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tailrl.policy import make_exact, named_weights
from tailrl.records import Request, Rollout
from tailrl.rollout import Decoding, exactness
from tailrl.rollout.exact import ExactSampler
from tailrl.rollout.sampling import draw

V = 601  # odd, so that a row of logits ends within a vector register; two of the policies have rounder ones
MAX_LENGTH = 160
STOP_TOKENS = list(range(1, V, 40))  # many, so that responses of random weights end at all lengths
SIZES = {
    "vocab_size": V,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": STOP_TOKENS,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=3),
    "llama, 3 queries a key": LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=32),
    "qwen2, 2 queries a key": Qwen2Config(
        **{**SIZES, "tie_word_embeddings": False, "vocab_size": 604}, num_attention_heads=2, num_key_value_heads=1
    ),
    "qwen3, 4 queries a key": Qwen3Config(
        **{**SIZES, "vocab_size": 640}, num_attention_heads=4, num_key_value_heads=1, head_dim=32
    ),
}
ROW_MULTIPLES = {"llama": 64, "llama, 3 queries a key": 64, "qwen2, 2 queries a key": 32, "qwen3, 4 queries a key": 16}


def random_policy(policy: str | PreTrainedConfig, dtype: str, seed: int = 0) -> PreTrainedModel:
    """Weights, norms' and biases too, large enough for a distribution with peaks."""
    config = CONFIGS[policy] if isinstance(policy, str) else policy
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    make_exact(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.0 if parameter.ndim == 1 else 0.3))
    return model


def sampler_of(model: PreTrainedModel, folder: Path, max_length: int = MAX_LENGTH) -> ExactSampler:
    """An exact engine with the model's weights."""
    model.config.save_pretrained(folder)
    GenerationConfig(eos_token_id=STOP_TOKENS[0]).save_pretrained(folder)
    sampler = ExactSampler(folder, str(model.dtype).removeprefix("torch."), max_length)
    sampler.load_weights(named_weights(model))
    return sampler


def random_requests(count: int, longest: int = 50, seed: int = 0, threshold: float = 0.0) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, V, length).tolist()) for length in rng.integers(1, longest + 1, count)]
    return [Request(prompt, 1000 * seed + i, threshold) for i, prompt in enumerate(prompts)]


def same_bits(left: Rollout, right: Rollout) -> bool:
    names = ("logp_infer_T", "log_kept_infer_T", "kept_vocab_infer_T")
    return left.tokens == right.tokens and all(
        getattr(left, name).tobytes() == getattr(right, name).tobytes() for name in names
    )


@torch.no_grad()
def redrawn_from_kept_logits(requests: Sequence[Request], rollouts: Sequence[Rollout], decoding: Decoding) -> int:
    """Draws the token of every kept place again from its logits, and compares; how many places there were."""
    kept, every = 0, decoding.keep_every
    for request, rollout in zip(requests, rollouts, strict=True):
        positions = [t for t in range(len(rollout.tokens)) if (request.start + t - request.seed) % every == 0]
        assert len(rollout.logits_infer_KV) == len(positions)
        for position, logits_V in zip(positions, rollout.logits_infer_KV, strict=True):
            place = [request.seed], [request.start + position]
            drawn = draw(torch.from_numpy(logits_V)[None], decoding.rule, torch.tensor([[request.threshold]]), *place)
            assert int(drawn.token_S) == rollout.tokens[position]
            assert float(drawn.logp_S) == pytest.approx(rollout.logp_infer_T[position], abs=1e-6)
        kept += len(positions)
    return kept


def differing_tokens(
    model: PreTrainedModel,
    sampled: Sequence[tuple[Request, Rollout]],
    decoding: Decoding,
    sizes: Sequence[int],
) -> tuple[int, int]:
    """Tokens of which log π^mp, log Z or |V_S| has other bits in the trainer, and all tokens.

    Args:
        model: the trainer's.
        sampled: requests and what was sampled for them, in the order in which the trainer sees them.
        decoding: what they were sampled with.
        sizes: responses in each micro-batch; the last one takes what is left.
    """
    wrong = total = start = 0
    for size in [*sizes, len(sampled)]:
        group = sampled[start : start + size]
        start += size
        if not group:
            break
        wrong += exactness.differing_tokens(model, group, decoding)
        total += sum(len(rollout.tokens) for _, rollout in group)
    return wrong, total
