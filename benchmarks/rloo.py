"""What the benchmarks of an RLOO step share: the model and its sizes, TRL's trainer on it, the table of CPU times."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from table import ratios
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 4, 16, 64, 2048
LOGIT_SCALE = 7.0  # standard deviation of the logits, at which ρ = e⁻¹³ keeps some 6 % of the tokens
LEARNING_RATE = 1e-6  # the tokens stay what the policy would sample


def make_model() -> LlamaForCausalLM:
    """A Llama of 4 M parameters with random weights, the same every time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
    )
    with torch.no_grad():
        nn.init.normal_(model.lm_head.weight, std=LOGIT_SCALE / 256**0.5)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """As training makes it; TRL's has the same settings."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def train_with_trl(
    trainer_class: Any,
    model: LlamaForCausalLM,
    tokenizer: Any,
    prompts: Sequence[str],
    reward: Callable[..., list[float]],
    callback: TrainerCallback,
    folder: str,
) -> None:
    """Train the model with TRL, on `PROMPTS` new prompts a step; the callback and the class measure."""
    from datasets import Dataset
    from trl import RLOOConfig

    settings = RLOOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=len(prompts) // PROMPTS,
        learning_rate=LEARNING_RATE,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train()


def compared(seconds: Mapping[str, Sequence[float]], bases: Mapping[str, str]) -> list[dict[str, object]]:
    """A row for each case: CPU seconds, and `ratios` to each base.

    Args:
        seconds: of each case in each round.
        bases: case that others are compared with, by the name of the column.
    """
    rows: list[dict[str, object]] = []
    for name, values in seconds.items():
        times = {"cpu_seconds": round(statistics.median(values), 3), "cpu_seconds_min": round(min(values), 3)}
        rows.append({"case": name, "rounds": len(values), **times})
        for column, base in bases.items():
            rows[-1] |= ratios(column, values, seconds[base])
    return rows


def silence_ends(model: LlamaForCausalLM) -> None:
    """Give end and padding the logit 0, where others win by many times that: every response runs to its limit."""
    with torch.no_grad():
        model.lm_head.weight[:2] = 0
