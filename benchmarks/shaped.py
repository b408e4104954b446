"""A policy of any sizes with random weights, for benchmarks and tests that need no trained one."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tailrl.model.forward import PACKED_ATTENTION
from tailrl.planning.shapes import Shape


def config_of(shape: Shape, **more: Any) -> PreTrainedConfig:
    """Qwen3's configuration where queries and keys are normed, with experts Qwen3-MoE's, else Llama's; packed rows."""
    kind = Qwen3Config if shape.normed else LlamaConfig
    if shape.experts:
        kind = Qwen3MoeConfig
        more |= {
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "norm_topk_prob": True,
            "experts_implementation": "grouped_mm",
        }
    return kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        tie_word_embeddings=shape.tied,
        attn_implementation=PACKED_ATTENTION,
        **more,
    )


def shaped_policy(shape: Shape, length: int, end: int | None = None, seed: int = 0) -> PreTrainedModel:
    """In float32 on the CPU; `length` is its longest sequence, `end` its end token."""
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None if end is None else 1}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config_of(shape, max_position_embeddings=length, **tokens)
    )
    return model
