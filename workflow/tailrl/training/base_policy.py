"""The base policy, from which every arm starts: created and warm-started here, or loaded.

The warm start is supervised training on worked solutions.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.artifacts.manifest import MANIFEST, files_in, vouched_checksum, write_manifest
from tailrl.config.policy import Policy, PretrainedPolicy, ScratchPolicy, WarmStart
from tailrl.config.source_files import at_start, job_files
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import check_vocabulary, create_policy, encode_prompt, load_policy, load_tokenizer, save_policy
from tailrl.model.routing import Routing, routers
from tailrl.model.tokenizer import train_tokenizer
from tailrl.model.tokenizer_trial import try_tokenizer
from tailrl.runtime.atomic_files import unchanged
from tailrl.runtime.errors import DataError, ModelError
from tailrl.tasks.problem import Problem, read_problems
from tailrl.training.muon import Muon

TOKENIZER_SOLUTIONS = 2000
"""Worked solutions that the tokenizer is trained on; more would leave fewer tokens for the prose."""


def write_base_policy(settings: Policy, warm_start_file: Path, out: Path) -> None:
    """Write the base policy as a Hugging Face folder; raises StudyError where that fails.

    It is created and warm-started here, with its losses in warm_start.json, or loaded from a folder or the hub. Its
    manifest lies in the folder.
    """
    sources = at_start(job_files("policy", settings))
    if isinstance(settings, PretrainedPolicy):
        with unchanged(Path(settings.path).glob("*")):
            try_tokenizer(settings.path)
            tokenizer = load_tokenizer(settings.path)
            model = load_policy(settings.path)
        check_vocabulary(model.config, tokenizer, settings.path)
        save_policy(model, tokenizer, out)
        write_manifest(out / MANIFEST, files_in(out), sources=sources)
        return
    if not isinstance(settings, ScratchPolicy):
        raise RuntimeError(f"no such policy: {settings.source}")
    inputs = {"problems": vouched_checksum(warm_start_file)}
    problems = read_problems(warm_start_file)
    if not all(problem.solution for problem in problems):
        raise DataError(f"{warm_start_file}: a warm start needs worked solutions, which this task does not have")
    texts = (problem.prompt + problem.solution for problem in problems[:TOKENIZER_SOLUTIONS])
    tokenizer = train_tokenizer(settings.vocabulary_size, texts)
    model = create_policy(settings, tokenizer, settings.warm_start.seed)
    losses = warm_start(model, tokenizer, problems, settings.warm_start)
    save_policy(model, tokenizer, out)
    (out / "warm_start.json").write_text(json.dumps({"loss": losses}) + "\n", encoding="utf-8")
    write_manifest(out / MANIFEST, files_in(out), inputs=inputs, sources=sources)


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
    mixture = bool(routers(model))
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
        routing = Routing() if mixture else None
        hidden_TH = hidden_states(model, batch.tokens_P, batch.packing, routing)[batch.predict_T]
        loss = nn.functional.cross_entropy(hidden_TH @ head_weight(model).T, batch.targets_T)
        losses.append(loss.item())
        if routing is not None:
            loss = loss + settings.load_balancing * routing.load_balancing(model.config.num_experts_per_tok)
        if not math.isfinite(losses[-1]):
            raise ModelError(
                f"warm start: the loss is {losses[-1]} at step {step}; lower policy.warm_start.learning_rate"
            )
        if (step + 1) % max(1, steps // 20) == 0 or step + 1 == steps:
            print(f"warm start  step {step + 1}/{steps}  loss {losses[-1]:.3g}", file=sys.stderr, flush=True)
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
        Muon(matrices, lr=7 * learning_rate, momentum=0.9),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
