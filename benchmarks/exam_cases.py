"""Logs of known cause: a fault, planted between a policy that samples and the same policy that trains."""

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exam_models import Trained, score
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import PreTrainedModel

from tailrl.config.probe import ProbeSettings
from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.model.quantize import int4_groups, rounded_cache, rounded_rows
from tailrl.objective.disturbance import round_weights
from tailrl.probes.model.probe import probe_model
from tailrl.rollout import Decoding
from tailrl.rollout.transformers import TransformersSampler
from tailrl.runtime.seeding import derive_seed

AGAIN_ROW = 600
"""Tokens of a packed row when the trainer computes once more."""

OTHER_ROW = 350
"""Tokens of a packed row when the trainer's own log-probs stand in for the sampler's."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What differs between the sampler and the trainer; by default nothing does.

    Attributes:
        dtype, trainer_dtype: of weights and activations.
        weights: the sampler's weights, rounded: int8, int4 or float8.
        cache: the sampler's keys and values are rounded to float8. flips: the share of tokens whose router errs.
        age: the sampler's weights are so many steps old; `reused`: instead the trainer's are so many steps newer.
        temperature, trainer_temperature: of either side; raw: the sampler logs log-probs before temperature and mask;
            rescored: its log-probs are the trainer's, packed in a third way.
        rule, threshold: the sampler's truncation, a key of `safe_set.RULES`; banned: the share of tokens that it never
            samples.
        floor: of the dial.
        context: what the trainer sees for the prompt: twice, prefix, other, cut, before, after (see `_contexts`).
        rope: of the trainer's positions. dropout, attention, layer, values, embedding: faults of the trainer that no
            rule knows.
        shift: the trainer's log-probs are moved by so many tokens. nan, clip, mask: see `_spoiled`.
        columns: optional columns that are logged.
        engine: vllm: the log is a probe's of the real engine in `dtype`; kv_cache: of its keys and values.
    """

    dtype: str = "float32"
    trainer_dtype: str = "float32"
    weights: str = ""
    cache: bool = False
    flips: float = 0.0
    age: int = 0
    reused: int = 0
    temperature: float = 1.0
    trainer_temperature: float = 1.0
    raw: bool = False
    rescored: bool = False
    rule: str = "full"
    threshold: float = 0.0
    banned: float = 0.0
    floor: float = 0.0
    context: str = ""
    dropout: float = 0.0
    attention: float = 1.0
    rope: float = 1.0
    layer: float = 1.0
    values: float = 1.0
    embedding: float = 1.0
    shift: int = 0
    nan: str = ""
    clip: str = ""
    at: float = 0.0
    mask: str = ""
    columns: tuple[str, ...] = ()
    engine: str = ""
    kv_cache: str = "auto"


@dataclass(frozen=True, slots=True)
class Case:
    """A log with its truth: the planted causes, none for a clean log; `floor`: k3 of the trainer against itself."""

    set: str
    model: str
    number: int
    truth: tuple[str, ...]
    fault: dict[str, Any]
    floor: float
    log: Log


def make_log(trained: Trained, fault: Fault, seed: int, count: int) -> tuple[Log, float]:
    """A log with this fault, and k3 of the trainer against itself packed in another way."""
    if fault.engine:
        return _probed(trained, fault, seed, count)
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
    return pack([_spoiled(row, fault, drawn) for row in rows]), float(np.mean(floors))


def _probed(trained: Trained, fault: Fault, seed: int, count: int) -> tuple[Log, float]:
    """The log of a probe of the policy, with the real engine, in a process of its own as the engine asks for."""
    texts = [problem.prompt for problem in random.Random(seed).sample(trained.problems, count // 4)]
    settings = ProbeSettings(
        sampler=SamplerSettings(dtype=fault.dtype, kv_cache_dtype=fault.kv_cache),
        samples=count,
        seed=seed,
        temperature=fault.temperature,
        max_new_tokens=trained.spec.max_new_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows = pool.submit(_probe_rows, str(trained.folder), settings, file).result()
    log = pack(rows)
    delta_T = log.again_T - log.trainer_T
    return log, float((np.expm1(delta_T) - delta_T).mean())


def _probe_rows(folder: str, settings: ProbeSettings, prompts: Path) -> list[LoggedRow]:
    return list(probe_model(folder, settings, prompts).rows)


def _part(
    trained: Trained, fault: Fault, seed: int, count: int, sampler_at: int, trainer_at: int
) -> tuple[list[LoggedRow], float]:
    requests = trained.requests(seed, count, fault.threshold)
    decoding = Decoding(
        fault.temperature,
        trained.spec.max_new_tokens,
        rule=fault.rule,
        disturbance=Disturbance(floor=fault.floor),
    )
    weights = trained.past[sampler_at]
    sampler = _sampler(trained, fault, weights)
    with _banned(sampler, fault.banned, seed):
        rollouts = sampler.generate(requests, decoding)
    trainer = copy.deepcopy(trained.model)
    trainer.load_state_dict(trained.past[trainer_at])
    trainer.to(getattr(torch, fault.trainer_dtype))
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts]
    seen = _contexts(prompts, fault.context)
    with _broken(trainer, fault, seed):
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


# --- the sampler's side --------------------------------------------------------------------------------


def _sampler(trained: Trained, fault: Fault, weights: dict[str, Tensor]) -> TransformersSampler:
    sampler = trained.sampler(fault.dtype)
    if fault.weights == "float8":
        weights = dict(round_weights(weights.items(), "float8_e4m3"))
    elif fault.weights:
        weights = {name: _quantised(name, weight, fault.weights) for name, weight in weights.items()}
    sampler.load_weights(weights.items())
    if fault.weights == "int8":
        _hook(sampler.model, "_proj", lambda module: module.register_forward_pre_hook(_int8_input))
    if fault.cache:
        for name in ("k_proj", "v_proj"):
            _hook(sampler.model, name, lambda module: module.register_forward_hook(_float8_output))
    if fault.flips:
        _hook(sampler.model, "gate", lambda module: module.register_forward_hook(_flip(fault.flips)))
    return sampler


def _hook(model: nn.Module, ending: str, register: Callable[[nn.Module], Any]) -> None:
    for name, module in model.named_modules():
        if name.endswith(ending):
            register(module)


def _quantised(name: str, weight: Tensor, kind: str) -> Tensor:
    """Projections alone, symmetric: int8 by output channel, int4 in groups of 32 with scales in float32."""
    if "proj" not in name or weight.ndim < 2:
        return weight
    if kind == "int8":
        return rounded_rows(weight, "int8")
    small, scale = int4_groups(weight.flatten(0, -2), 32, torch.float32)
    return (small.view(*scale.shape, 32) * scale[..., None]).view_as(weight)


def _int8_input(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return rounded_rows(given[0], "int8"), *given[1:]


def _float8_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return rounded_cache(output, torch.float8_e4m3fn, toward_zero=False)


def _flip(share: float) -> Callable[..., Any]:
    """A router that errs by noise of one nat on a share of its tokens, and nowhere else."""

    def hook(module: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, indices = output
        chosen_T1 = torch.rand(len(logits), 1) < share
        noisy = (logits + chosen_T1 * torch.randn_like(logits)).softmax(-1)
        top, index = noisy.topk(module.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        return logits, torch.where(chosen_T1, top, scores), torch.where(chosen_T1, index, indices)

    return hook


@contextmanager
def _banned(sampler: TransformersSampler, share: float, seed: int) -> Iterator[None]:
    """The sampler never draws a share of the vocabulary."""
    if not share:
        yield
        return
    banned_V = torch.rand(sampler.model.config.vocab_size, generator=torch.Generator().manual_seed(seed)) < share
    banned_V[list(map(int, sampler.stop))] = False

    def hook(_: Any, __: Any, output: Any) -> Any:
        output.logits = output.logits.masked_fill(banned_V, -1e4)
        return output

    handle = sampler.model.register_forward_hook(hook)
    yield
    handle.remove()


# --- the trainer's side --------------------------------------------------------------------------------


def _contexts(prompts: Sequence[tuple[int, ...]], kind: str) -> list[tuple[int, ...]]:
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


@contextmanager
def _broken(trainer: PreTrainedModel, fault: Fault, seed: int) -> Iterator[None]:
    """Faults of the trainer's model that no rule knows."""
    torch.manual_seed(seed)
    base: Any = trainer.base_model
    with ExitStack() as stack:
        for layer in base.layers if fault.dropout else ():
            handle = layer.mlp.register_forward_hook(lambda _m, _i, out: dropout(out, fault.dropout))
            stack.callback(handle.remove)
        for layer in base.layers if fault.attention != 1.0 else ():
            layer.self_attn.scaling *= fault.attention
        if fault.rope != 1.0:
            base.rotary_emb.inv_freq.mul_(fault.rope)
        if fault.layer != 1.0:
            middle = base.layers[len(base.layers) // 2]
            handle = middle.mlp.register_forward_hook(lambda _m, _i, out: out * fault.layer)
            stack.callback(handle.remove)
        if fault.embedding != 1.0:
            handle = base.embed_tokens.register_forward_hook(lambda _m, _i, out: out * fault.embedding)
            stack.callback(handle.remove)
        if fault.values != 1.0:
            handle = base.layers[0].self_attn.v_proj.register_forward_hook(lambda _m, _i, out: out * fault.values)
            stack.callback(handle.remove)
        yield


# --- what is written -----------------------------------------------------------------------------------


def _spoiled(row: LoggedRow, fault: Fault, random: np.random.Generator) -> LoggedRow:
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
