"""The sampler's side of a log of known cause: a fake-quantised or erring transformers engine, or a probe of vLLM."""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from exams.diagnose.faults import Fault
from exams.diagnose.mistakes import plant
from exams.diagnose.models import Trained
from tailrl.config.probe import ProbeSettings
from tailrl.config.sampler import SamplerSettings
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.model.quantize import int4_groups, rounded_cache, rounded_rows
from tailrl.objective.disturbance import round_weights
from tailrl.objective.kl_estimates import k3
from tailrl.probes.model.probe import probe_model
from tailrl.rollout import Decoding
from tailrl.rollout.transformers import TransformersSampler
from tailrl.rollout.types import Request


def probed(trained: Trained, fault: Fault, seed: int, count: int) -> tuple[Log, float]:
    """The log of a probe of the policy, with the real engine, in a process of its own as the engine asks for."""
    texts = [problem.prompt for problem in random.Random(seed).sample(trained.problems, count // 4)]
    sampler = {"kv_cache_dtype": fault.kv_cache, "quantization": fault.quantization, "group_size": fault.group}
    settings = ProbeSettings(
        sampler=SamplerSettings.model_validate({"dtype": fault.dtype} | sampler),
        samples=count,
        seed=seed,
        temperature=fault.temperature,
        max_new_tokens=trained.spec.longest,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows = pool.submit(_probe_rows, str(trained.folder), settings, file).result()
    log = pack(rows)
    delta_T = log.again_T - log.trainer_T
    return log, float(k3(delta_T).mean())


def _probe_rows(folder: str, settings: ProbeSettings, prompts: Path) -> list[LoggedRow]:
    return list(probe_model(folder, settings, prompts).rows)


def sampler_of(trained: Trained, fault: Fault, weights: dict[str, Tensor], seed: int) -> TransformersSampler:
    """The transformers engine with these weights, and the sampler's part of the fault."""
    sampler = trained.sampler(fault.dtype)
    if fault.weights == "float8":
        weights = dict(round_weights(weights.items(), "float8_e4m3"))
    elif fault.weights:
        weights = {name: quantised(name, weight, fault.weights) for name, weight in weights.items()}
    sampler.load_weights(weights.items())
    if fault.weights == "int8":
        _hook(sampler.model, "_proj", lambda module: module.register_forward_pre_hook(_int8_input))
    if fault.cache:
        for name in ("k_proj", "v_proj"):
            _hook(sampler.model, name, lambda module: module.register_forward_hook(_float8_output))
    if fault.flips:
        _hook(sampler.model, "gate", lambda module: module.register_forward_hook(_flip(fault.flips)))
    if fault.mistake and fault.mistaken == "sampler":
        plant(sampler.model, fault.mistake, fault.by, seed)
    return sampler


def _hook(model: nn.Module, ending: str, register: Callable[[nn.Module], Any]) -> None:
    for name, module in model.named_modules():
        if name.endswith(ending):
            register(module)


def quantised(name: str, weight: Tensor, kind: str) -> Tensor:
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
def banned(sampler: TransformersSampler, share: float, seed: int) -> Iterator[None]:
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


@dataclass(frozen=True)
class Sampled:
    """What transformers' own `generate` sampled.

    Attributes:
        prompts, responses: token ids. logps: nats, [T] of each response, of the distribution that it was drawn from.
        sets: bool [T, V] of each response: the tokens that could be drawn.
    """

    prompts: list[tuple[int, ...]]
    responses: list[tuple[int, ...]]
    logps: list[Tensor]
    sets: list[Tensor]


@torch.no_grad()
def generated(
    sampler: TransformersSampler, requests: Sequence[Request], settings: Mapping[str, float], longest: int, seed: int
) -> Sampled:
    """Responses by transformers' own `generate`, with such options as a generation_config.json sets."""
    torch.manual_seed(seed)
    prompts = [request.prompt_tokens for request in requests]
    widest = max(map(len, prompts))
    ids_SP = torch.tensor([[0] * (widest - len(prompt)) + list(prompt) for prompt in prompts])
    mask_SP = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    options["top_k"] = int(options["top_k"])
    stop = sampler.stop.tolist()
    model: Any = sampler.model
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=stop, pad_token_id=0, **options)
    made = model.generate(
        ids_SP, attention_mask=mask_SP, max_new_tokens=longest, output_scores=True, return_dict_in_generate=True
    )
    responses, logps, sets = [], [], []
    for row, drawn in enumerate(made.sequences[:, widest:].tolist()):
        ends = [place for place, token in enumerate(drawn) if token in stop]
        response = drawn[: ends[0] + 1] if ends else drawn
        logp_TV = torch.stack([step_SV[row] for step_SV in made.scores[: len(response)]]).float().log_softmax(-1)
        responses.append(tuple(response))
        logps.append(logp_TV.gather(1, torch.tensor(response)[:, None])[:, 0])
        sets.append(torch.isfinite(logp_TV))
    return Sampled(prompts, responses, logps, sets)


def in_flight(
    older: TransformersSampler,
    newer: TransformersSampler,
    requests: Sequence[Request],
    decoding: Decoding,
    seed: int,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[Tensor]]:
    """Prompts, responses and log-probs where weights are exchanged within each response, at a place of its own."""
    begun = older.generate(requests, decoding)
    rng = random.Random(seed)
    cuts = [rng.randint(1, max(1, len(rollout.tokens) - 1)) for rollout in begun]
    rest = [
        Request((*one.prompt_tokens, *rollout.tokens[:cut]), one.seed + 1, one.threshold)
        for one, rollout, cut in zip(requests, begun, cuts, strict=True)
    ]
    ended = newer.generate(rest, decoding)
    responses, logps = [], []
    for first, second, cut in zip(begun, ended, cuts, strict=True):
        whole = (*first.tokens[:cut], *second.tokens)[: decoding.max_new_tokens]
        logp_T = np.concatenate([first.logp_sampler_T[:cut], second.logp_sampler_T])[: len(whole)]
        responses.append(whole)
        logps.append(torch.from_numpy(logp_T))
    return [request.prompt_tokens for request in requests], responses, logps
