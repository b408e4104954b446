"""Logs of known cause: a fault, planted between a policy that samples and the same policy that trains."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from exam_faults import Fault
from exam_mistakes import plant
from exam_models import Trained, score
from exam_samplers import banned, probed, sampler_of
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.sampler import Disturbance
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.rollout import Decoding
from tailrl.runtime.seeding import derive_seed

AGAIN_ROW = 600
"""Tokens of a packed row when the trainer computes once more."""

OTHER_ROW = 350
"""Tokens of a packed row when the trainer's own log-probs stand in for the sampler's."""


def make_log(trained: Trained, fault: Fault, seed: int, count: int) -> tuple[Log, float]:
    """A log with this fault, and k3 of the trainer against itself packed in another way."""
    if fault.engine:
        return probed(trained, fault, seed, count)
    steps = [len(trained.past) - 1 - 2 * i for i in range(4)] if fault.age or fault.reused else None
    if steps is None:
        choices = sorted({0, len(trained.past) // 3, len(trained.past) - 1})
        states = [(choices[seed % len(choices)],) * 2]
    else:
        states = [(max(0, step - fault.age - fault.reused), step) for step in steps]
    rows: list[LoggedRow] = []
    floors = []
    for number, (sampler_at, trainer_at) in enumerate(sorted(states)):
        part = derive_seed("part", seed, number) % 2**31
        found, floor = _part(trained, fault, part, count // len(states), sampler_at, trainer_at)
        version = float(sampler_at) if "version" in fault.columns else np.nan
        step = float(trainer_at) if steps is not None else np.nan
        rows += [replace(row, step=step, version=version) for row in found]
        floors.append(floor)
    drawn = np.random.default_rng(seed)
    return pack([spoiled(row, fault, drawn) for row in rows]), float(np.mean(floors))


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
    with banned(sampler, fault.banned, seed):
        rollouts = sampler.generate(requests, decoding)
    trainer = copy.deepcopy(trained.model)
    trainer.load_state_dict(trained.past[trainer_at])
    trainer.to(getattr(torch, fault.trainer_dtype))
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts]
    seen = contexts(prompts, fault.context)
    if fault.mistake and fault.mistaken == "trainer":
        plant(trainer, fault.mistake, fault.by, seed)
    train = score(trainer, seen, responses, fault.trainer_temperature)
    again = score(trainer, seen, responses, fault.trainer_temperature, AGAIN_ROW)
    infer = [torch.from_numpy(np.asarray(r.logp_infer_T)) for r in rollouts]
    if fault.raw:
        raw = copy.deepcopy(trained.model)
        raw.load_state_dict(weights)
        infer = score(raw.to(getattr(torch, fault.dtype)), prompts, responses)
    if fault.rescored:
        infer = score(trainer, prompts, responses, fault.trainer_temperature, OTHER_ROW)
    recomputed = score(_with(trained, weights), prompts, responses) if "recomputed" in fault.columns else None
    delta_T = torch.cat(again).double() - torch.cat(train).double()
    floor = float((delta_T.expm1() - delta_T).mean())
    rewards = trained.rewards(seed, rollouts)
    rows = []
    for i, rollout in enumerate(rollouts):
        group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
        advantage = rewards[i] - sum(group) / len(group)
        rows.append(
            LoggedRow(
                where="exam",
                sampler_T=infer[i].double().numpy(),
                trainer_T=train[i].double().numpy(),
                token_T=np.array(rollout.tokens, np.int64),
                recomputed_T=None if recomputed is None else recomputed[i].double().numpy(),
                again_T=again[i].double().numpy() if "again" in fault.columns else None,
                advantage_T=np.full(len(rollout.tokens), advantage) if "reward" in fault.columns else None,
                reward=rewards[i] if "reward" in fault.columns else np.nan,
            )
        )
    return rows, floor


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
    )
