"""Logs of known cause: a fault, planted between a policy that samples and the same policy that trains."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from exams.diagnose.faults import Fault
from exams.diagnose.mistakes import plant
from exams.diagnose.models import Trained, score
from exams.diagnose.samplers import banned, generated, in_flight, probed, sampler_of
from tailrl.config.sampler import Disturbance
from tailrl.diagnosis.log import Log, LoggedRow, pack, seen_before
from tailrl.objective.kl_estimates import k3
from tailrl.rollout import Decoding
from tailrl.runtime.seeding import derive_seed

AGAIN_ROW = 600
"""Tokens of a packed row when the trainer computes once more."""

OTHER_ROW = 350
"""Tokens of a packed row when the trainer's own log-probs stand in for the sampler's."""


AGES = (0.25, 0.75, 1.25, 1.75)
"""Ages of the parts of a log over the fault's, where they differ."""

PARTS = 4
"""Parts of a log that has several steps."""

WHERE_FROM = "engine"
"""The column with the engine of each response."""


def make_log(trained: Trained, fault: Fault, seed: int, count: int) -> tuple[Log, float]:
    """A log with this fault, and k3 of the trainer against itself packed in another way."""
    if fault.engine:
        return probed(trained, fault, seed, count)
    drawn = np.random.default_rng(seed)
    if fault.some:
        return _two_engines(trained, fault, seed, count)
    rows: list[LoggedRow] = []
    floors = []
    parts = _parts(trained, fault, seed)
    for number, (sampler_at, trainer_at) in enumerate(parts):
        part = derive_seed("part", seed, number) % 2**31
        made, floor = _part(trained, fault, part, count // len(parts), sampler_at, trainer_at)
        several = len(parts) > 1
        for place, row in enumerate(made):
            # Half of the logs of one state say a step too: a step is no sign of old weights.
            step = trainer_at if several else 10.0 + place * PARTS // len(made) if seed % 2 or fault.behind else np.nan
            version = sampler_at if fault.age or fault.reused else step - fault.behind
            rows.append(replace(row, step=step, version=version if "version" in fault.columns else np.nan))
        floors.append(floor)
    return pack([spoiled(row, fault, drawn) for row in rows]), float(np.mean(floors))


def _parts(trained: Trained, fault: Fault, seed: int) -> list[tuple[int, int]]:
    """For each part of a log the numbers of the checkpoints of the sampler and of the trainer."""
    last = len(trained.past) - 1
    if fault.pinned:
        return [(last - (PARTS - 1) * fault.pinned, last - i * fault.pinned) for i in reversed(range(PARTS))]
    if fault.age or fault.reused:
        ages = [fault.age + fault.reused] * PARTS
        if "version" in fault.columns and not fault.constant:
            ages = [round(share * fault.age) for share in AGES]
        steps = [last - 2 * i for i in range(PARTS)]
        return sorted((max(0, step - age), step) for step, age in zip(steps, ages, strict=True))
    choices = sorted({0, last // 3, last})
    return [(choices[seed % len(choices)],) * 2]


def _two_engines(trained: Trained, fault: Fault, seed: int, count: int) -> tuple[Log, float]:
    """A log of two engines, of which one has another fault; where the columns say so, with the engine's name."""
    plain = replace(fault, some={})
    last = len(trained.past) - 1
    floors, rows = [], []
    for name, own, share in (("a", plain, 0.75), ("b", replace(plain, **fault.some), 0.25)):
        part = derive_seed("engine", seed, name) % 2**31
        made, floor = _part(trained, own, part, int(count * share), max(0, last - own.age), last)
        labels = {WHERE_FROM: name} if WHERE_FROM in fault.columns else {}
        rows += [replace(row, labels=labels) for row in made]
        floors.append(floor)
    order = np.random.default_rng(seed).permutation(len(rows))
    return pack([rows[i] for i in order]), float(np.mean(floors))


def _part(
    trained: Trained, fault: Fault, seed: int, count: int, sampler_at: int, trainer_at: int
) -> tuple[list[LoggedRow], float]:
    requests = trained.requests(seed, count, fault.threshold)
    decoding = Decoding(
        fault.temperature,
        trained.spec.longest,
        rule=fault.rule,
        disturbance=Disturbance(floor=fault.floor),
    )
    weights = trained.past[sampler_at]
    sampler = sampler_of(trained, fault, weights, seed)
    sets: list[Tensor] | None = None
    if fault.settings:
        sampled = generated(sampler, requests, fault.settings, decoding.max_new_tokens, seed)
        prompts, responses, infer = sampled.prompts, sampled.responses, sampled.logps
        sets = sampled.sets if fault.pruned else None
    elif fault.flight:
        newer = sampler_of(trained, fault, trained.past[trainer_at], seed)
        prompts, responses, infer = in_flight(sampler, newer, requests, decoding, seed)
    else:
        with banned(sampler, fault.banned, seed):
            rollouts = sampler.generate(requests, decoding)
        prompts, responses = [r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts]
        infer = [torch.from_numpy(np.asarray(r.logp_sampler_T)) for r in rollouts]
    trainer = copy.deepcopy(trained.model)
    trainer.load_state_dict(trained.past[trainer_at])
    trainer.to(getattr(torch, fault.trainer_dtype))
    if fault.adapter:
        adapt(trainer, fault.adapter, seed)
    seen = contexts(prompts, fault.context)
    if fault.mistake and fault.mistaken == "trainer":
        plant(trainer, fault.mistake, fault.by, seed)
    train = score(trainer, seen, responses, fault.trainer_temperature, set_TV=sets)
    again = train
    if trained.spec.kind != "pretrained" or "again" in fault.columns:
        again = score(trainer, seen, responses, fault.trainer_temperature, AGAIN_ROW, sets)
    if fault.raw:
        raw = copy.deepcopy(trained.model)
        raw.load_state_dict(weights)
        infer = score(raw.to(getattr(torch, fault.dtype)), prompts, responses)
    if fault.rescored:
        infer = score(trainer, prompts, responses, fault.trainer_temperature, OTHER_ROW)
    if fault.last:
        alone = score(trainer, [prompt[-1:] for prompt in prompts], responses)
        infer = [torch.cat([own[: -fault.last], other[-fault.last :]]) for own, other in zip(infer, alone, strict=True)]
    recomputed = score(_with(trained, weights), prompts, responses) if "recomputed" in fault.columns else None
    delta_T = torch.cat(again).double() - torch.cat(train).double()
    floor = float(k3(delta_T).mean())
    rewards = trained.rewards(seed, responses)
    rows = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
        advantage = rewards[i] - sum(group) / len(group)
        ids_T = np.array(response, np.int64)
        # A third of the logs has no prompts: only the response's own tokens are known to have occurred.
        seen_T = seen_before(ids_T if seed % 3 == 0 else np.array([*prompt, *response]))[-len(response) :]
        rows.append(
            LoggedRow(
                where="exam",
                sampler_T=infer[i].double().numpy(),
                trainer_T=train[i].double().numpy(),
                token_T=ids_T,
                recomputed_T=None if recomputed is None else recomputed[i].double().numpy(),
                again_T=again[i].double().numpy() if "again" in fault.columns else None,
                advantage_T=np.full(len(response), advantage) if "reward" in fault.columns else None,
                reward=rewards[i] if "reward" in fault.columns else np.nan,
                seen_T=seen_T,
            )
        )
    return rows, floor


def adapt(model: PreTrainedModel, size: float, seed: int) -> None:
    """Adds a random adapter of rank 4 to the MLPs' last projections, in place; `size`: over the weights' spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("down_proj.weight") or name.endswith("experts.down_proj"):
                matrices = weight.unsqueeze(0) if weight.ndim == 2 else weight
                for matrix in matrices:
                    up, down = (torch.randn(n, 4, generator=generator) for n in matrix.shape)
                    matrix += size * float(matrix.std()) / 2 * (up @ down.T).to(matrix.dtype)


def _with(trained: Trained, weights: dict[str, Tensor]) -> PreTrainedModel:
    model = copy.deepcopy(trained.model)
    model.load_state_dict(weights)
    return model


def contexts(prompts: Sequence[tuple[int, ...]], kind: str) -> list[tuple[int, ...]]:
    """What the trainer sees in place of the prompts: each twice, after another one, another one alone, without its
    first token, or with six wrong tokens before or after it."""
    if kind == "twice":
        return [prompt * 2 for prompt in prompts]
    if kind == "prefix":
        return [prompts[0] + prompt for prompt in prompts]
    if kind == "other":
        return [*prompts[4:], *prompts[:4]]
    if kind == "cut":
        return [prompt[1:] if len(prompt) > 1 else prompt for prompt in prompts]
    if kind in ("before", "after"):  # what another template puts around every prompt: six tokens of some prompts
        frame = tuple(token for prompt in prompts[::8] for token in prompt[-2:])[:6]
        return [frame + prompt if kind == "before" else prompt + frame for prompt in prompts]
    return list(prompts)


def spoiled(row: LoggedRow, fault: Fault, random: np.random.Generator) -> LoggedRow:
    """Faults of the log: a shift, NaN or infinite numbers of one side, a clip of one side, a wrong mask.

    Masks: `prompt` has prompt tokens with the sampler's 0, `padding` has padding after the end with the trainer's
    numbers and the sampler's 0, `zeros` sets the last third of the trainer's numbers to 0.
    """
    sides = {"sampler": row.sampler_T.copy(), "trainer": row.trainer_T.copy()}
    if fault.shift:
        rolled_T = np.roll(sides["trainer"], fault.shift)
        # What comes in at the end is another token's log-prob, as where a frame of a padded batch is moved.
        rolled_T[: fault.shift] = -random.exponential(1.0, fault.shift)
        sides["trainer"] = rolled_T
    if fault.nan:
        side, value = fault.nan.split()
        sides[side][random.random(len(row.sampler_T)) < fault.at] = float(value)
    if fault.clip:
        sides[fault.clip] = np.maximum(sides[fault.clip], fault.at)
    if not fault.mask:
        return replace(row, sampler_T=sides["sampler"], trainer_T=sides["trainer"])
    if fault.mask == "zeros":
        sides["trainer"][len(row.trainer_T) * 2 // 3 :] = 0.0
        return replace(row, sampler_T=sides["sampler"], trainer_T=sides["trainer"])
    more = int(random.integers(2, 9))
    nothing_T, other_T = np.zeros(more), -random.exponential(4.0, more)
    first = fault.mask == "prompt"

    def longer(own_T: Any, fill_T: Any) -> Any:
        return None if own_T is None else np.concatenate([fill_T, own_T] if first else [own_T, fill_T])

    ids_T = np.zeros(more, np.int64)
    return replace(
        row,
        sampler_T=longer(sides["sampler"], nothing_T),
        trainer_T=longer(sides["trainer"], other_T),
        token_T=longer(row.token_T, ids_T),
        recomputed_T=longer(row.recomputed_T, other_T),
        again_T=longer(row.again_T, other_T),
        advantage_T=longer(row.advantage_T, nothing_T),
        seen_T=None,  # the log's own ids say it
    )
