"""TRL's trainers with the adapter on the tests' tiny policy, and a batch of theirs made from our rollouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_fixture import RHO
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tailrl.records import Rollout
from tailrl.trl import Correction, with_dvp

TRAINERS = {"rloo": (RLOOTrainer, RLOOConfig), "grpo": (GRPOTrainer, GRPOConfig)}
LONGEST, TEMPERATURE = 8, 0.8


def make_trainer(
    kind: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    correction: Correction | None = None,
    dtype: torch.dtype = torch.float32,
    given: dict[str, Any] | None = None,
    rho: float = RHO,
    **settings: Any,
) -> Any:
    """A trainer on the policy of the folder, given more of its arguments, and settings that override the small ones."""
    base, config = TRAINERS[kind]
    small = {
        "min_p": RHO,
        "temperature": TEMPERATURE,
        "beta": 0.0,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    trainer = with_dvp(base, rho, correction)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        reward_funcs=reward,
        args=config(output_dir=str(out), **(small | settings)),
        train_dataset=Dataset.from_dict({"prompt": ["1+2=", "30+4=", "5*6*7=", "8-9="]}),
        processing_class=tokenizer,
        **(given or {}),
    )
    # As in the middle of training.
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Half of all responses are right, whatever they say."""
    return [float(sum(tokens) % 2) for tokens in completion_ids]


def padded(rows: Sequence[Sequence[float]], side: str, dtype: torch.dtype, fill: float = 0) -> Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)


def batch_of(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> dict[str, Tensor]:
    """The rollouts as TRL has them: prompts padded on the left, responses on the right."""
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts]
    lengths = [len(tokens) for tokens in responses]
    return {
        "prompt_ids": padded(prompts, "left", torch.int64, fill=1),
        "prompt_mask": padded([[1] * len(p) for p in prompts], "left", torch.int64),
        "completion_ids": padded(responses, "right", torch.int64, fill=1),
        "completion_mask": padded([[1] * n for n in lengths], "right", torch.int64),
        "sampling_per_token_logps": padded([r.logp_infer_T.tolist() for r in rollouts], "right", torch.float32),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(float(sum(lengths))),
    }


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """By name, then gone from the model."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found
