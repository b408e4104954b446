"""The warm start: supervised training of a policy from scratch on worked solutions."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.config.policy import WarmStart
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import encode_prompt
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem


def encode_solutions(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts and of their solutions, each solution with the end token."""
    prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    solutions = tokenizer([problem.solution for problem in problems], add_special_tokens=False)["input_ids"]
    return prompts, [[*ids, tokenizer.eos_token_id] for ids in solutions]


def warm_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], settings: WarmStart
) -> list[float]:
    """Minimise the cross-entropy of the solutions' tokens, in place.

    Muon trains the matrices of the blocks and AdamW the rest: on this task less than half the steps of AdamW alone.
    Rates rise briefly, then fall linearly to 0. Gradients are clipped to norm 1. Each problem is used once, in order.

    Returns:
        The loss of every step, nats per token.

    Raises:
        StudyError: the loss is not finite.
    """
    prompts, solutions = encode_solutions(problems, tokenizer)
    optimizers = _optimizers(model, settings.learning_rate)
    steps = math.ceil(len(problems) / settings.batch)
    rise = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise) * (1 - step / steps))
        for optimizer in optimizers
    ]
    losses = []
    for step in range(steps):
        chosen = slice(step * settings.batch, (step + 1) * settings.batch)
        batch = pack_batch(prompts[chosen], solutions[chosen])
        hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
        loss = nn.functional.cross_entropy(hidden_TH @ head_weight(model).T, batch.targets_T)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise StudyError(
                f"warm start: the loss is {losses[-1]} at step {step}; lower policy.warm_start.learning_rate"
            )
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    return losses


def _optimizers(model: PreTrainedModel, learning_rate: float) -> list[torch.optim.Optimizer]:
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return [
        # Muon's updates have a fixed norm, so its rate has another unit; 7 times AdamW's was good at several rates.
        torch.optim.Muon(matrices, lr=7 * learning_rate, momentum=0.9, weight_decay=0.0),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
