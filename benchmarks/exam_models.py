"""The policies of the exam of causes: made here, warm-started, and trained for some steps by RLOO.

Policies that settle the rules do arithmetic, sort or reverse words or numbers, write initials, or go on with a series.
All of them but the one of arithmetic were judges in an earlier run. The judges double or compare numbers. The
pretrained one is a set of its own.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import smollm2
import torch
from exam_tasks import TASKS, Task, problems
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.config.policy import ScratchPolicy, WarmStart
from tailrl.config.tasks.words import WordsTask
from tailrl.kernels.packing import micro_batches, pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import create_policy, encode_prompt, load_policy, load_tokenizer, save_policy
from tailrl.model.tokenizer import train_tokenizer
from tailrl.objective.advantages import rloo
from tailrl.rollout import Decoding
from tailrl.rollout.transformers import TransformersSampler
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score as score_response
from tailrl.training.base_policy import warm_start

SCORED_TOKENS = 2048
"""Tokens of a packed row."""

MAX_LENGTH = 192


@dataclass(frozen=True, slots=True)
class Spec:
    """A policy of the exam; `steps` of RLOO leave one checkpoint each.

    `longest`: tokens of a response. `vllm`: it has the logs of the real engine too.
    """

    name: str
    set: Literal["settle", "judge", "pretrained"]
    task: Task
    kind: Literal["llama", "mixture", "pretrained"]
    seed: int
    hidden: int = 128
    layers: int = 4
    vocabulary: int = 2048
    steps: int = 24
    learning_rate: float = 3e-4
    responses: int = 128
    longest: int = 64
    vllm: bool = False


def in_words(spec: Spec) -> str:
    """What a policy does and how large it is, for a reader."""
    if spec.kind == "pretrained":
        return f"{TASKS[spec.task]}: SmolLM2-135M, a pretrained transformer of 135 million parameters"
    kind = "a mixture of 8 experts, two a token" if spec.kind == "mixture" else "a plain transformer"
    return (
        f"{TASKS[spec.task]}: {kind}, {spec.layers} layers, {spec.hidden} numbers a token between them, "
        f"{spec.vocabulary:,} different tokens; trained here from nothing, then {spec.steps} steps of RLOO"
    )


SPECS = (
    Spec("arithmetic_64", "settle", "arithmetic", "llama", 12, hidden=64, layers=2, vocabulary=640),
    Spec("words_160", "settle", "words", "llama", 21, hidden=160, layers=3, vocabulary=1500),
    Spec("reverse_96", "settle", "reverse", "llama", 31, hidden=96, layers=5, vocabulary=900),
    Spec("reverse_mixture", "settle", "reverse", "mixture", 32, layers=2, vocabulary=700),
    Spec("series_mixture", "settle", "series", "mixture", 42, layers=3, vocabulary=800),
    Spec("numbers_96", "settle", "numbers", "llama", 52, hidden=96, layers=3, vocabulary=600, vllm=True),
    Spec("initials_mixture", "settle", "initials", "mixture", 53, layers=2, vocabulary=750, vllm=True),
    Spec("doubles_128", "judge", "doubles", "llama", 61, layers=4, vocabulary=650, vllm=True),
    Spec("signs_mixture", "judge", "signs", "mixture", 62, hidden=96, layers=3, vocabulary=720, vllm=True),
    Spec("smollm2", "pretrained", "words", "pretrained", 23, steps=4, learning_rate=1e-4, responses=32, longest=16),
)


@dataclass
class Trained:
    """A policy in memory: `past` holds its weights after each step, the last ones are the model's."""

    spec: Spec
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    problems: list[Problem]
    past: list[dict[str, Tensor]]

    def sampler(self, dtype: str = "float32") -> TransformersSampler:
        """The transformers engine with the model's weights."""
        sampler = TransformersSampler(self.folder, dtype, 2 * MAX_LENGTH)
        sampler.load_weights(self.model.state_dict().items())
        return sampler

    def requests(self, seed: int, count: int, threshold: float = 0.0, group: int = 4) -> list[Request]:
        """`count` requests, `group` a problem; the seed picks the problems."""
        chosen = [self.problems[derive_seed("problem", seed, i // group) % len(self.problems)] for i in range(count)]
        return [
            Request(tuple(encode_prompt(self.tokenizer, problem.prompt)), derive_seed("exam", seed, i), threshold)
            for i, problem in enumerate(chosen)
        ]

    def rewards(self, seed: int, rollouts: Sequence[Rollout], group: int = 4) -> list[float]:
        """1 or 0 for the response to each of the requests of `requests`."""
        found = []
        for i, rollout in enumerate(rollouts):
            problem = self.problems[derive_seed("problem", seed, i // group) % len(self.problems)]
            text = self.tokenizer.decode(rollout.tokens, skip_special_tokens=True)
            found.append(score_response(text, problem.answer, problem.compared))
        return found


@torch.no_grad()
def score(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float = 1.0,
    row: int = SCORED_TOKENS,
) -> list[Tensor]:
    """The log-probs of each response's tokens, nats, float32, by the packed forward; the weights' dtype computes."""
    found: dict[int, Tensor] = {}
    keys = [tuple(prompt) for prompt in prompts]
    for chosen in micro_batches(keys, [len(response) for response in responses], row):
        scored = _row(model, [keys[i] for i in chosen], [responses[i] for i in chosen], temperature)
        found.update(zip(chosen, scored, strict=True))
    return [found[i] for i in range(len(responses))]


def _row(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], temperature: float
) -> Iterable[Tensor]:
    batch = pack_batch(prompts, [list(response) for response in responses])
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    parts = []
    for hidden_RH, target_R in zip(torch.split(hidden_TH, 512), torch.split(batch.targets_T, 512), strict=True):
        logp_RV = ((hidden_RH @ head_weight(model).T).float() / temperature).log_softmax(-1)
        parts.append(logp_RV.gather(-1, target_R[:, None]).squeeze(-1))
    return torch.split(torch.cat(parts), [len(response) for response in responses])


def obtain(spec: Spec, folder: Path) -> Trained:
    """The policy from its folder; made first where there is none."""
    asked = _problems(spec, 400, 5)
    if not (folder / "past.pt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_base(spec, folder)
        trained = Trained(spec, folder, load_policy(folder), load_tokenizer(folder), asked, [])
        _train(trained)
        torch.save(trained.past, folder / "past.pt")
    trained = Trained(spec, folder, load_policy(folder), load_tokenizer(folder), asked, [])
    trained.past = torch.load(folder / "past.pt", weights_only=True)
    trained.model.load_state_dict(trained.past[-1])
    trained.model.eval().requires_grad_(False)
    return trained


def _problems(spec: Spec, count: int, seed: int, slip: float = 0.0) -> list[Problem]:
    if spec.kind == "pretrained":
        return load_task(WordsTask(name="words", problems=count, words=(2, 2), seed=seed)).problems
    return problems(spec.task, count, seed, slip)


def _write_base(spec: Spec, folder: Path) -> None:
    if spec.kind == "pretrained":
        smollm2.save(folder, shots="words")
        return
    seed = 1000 * spec.seed
    lessons = [*_problems(spec, 8000, seed), *_problems(spec, 3200, seed + 1, 0.3)]
    tokenizer = train_tokenizer(spec.vocabulary, (one.prompt + (one.solution or "") for one in lessons[-2000:]))
    mixture = spec.kind == "mixture"
    settings = ScratchPolicy(
        vocabulary_size=spec.vocabulary,
        hidden_size=spec.hidden,
        layers=spec.layers,
        heads=spec.hidden // 32,
        intermediate_size=spec.hidden if mixture else 3 * spec.hidden,
        experts=8 if mixture else None,
        max_length=2 * MAX_LENGTH,
    )
    model = create_policy(settings, tokenizer, spec.seed)
    warm_start(model, tokenizer, lessons, WarmStart(batch=64, learning_rate=3e-3))
    save_policy(model, tokenizer, folder)


def _train(trained: Trained) -> None:
    """RLOO on the exact policy: one checkpoint before the first step and one after each."""
    spec, model = trained.spec, trained.model
    sampler = trained.sampler()
    if spec.kind == "pretrained":  # the last blocks alone, whose checkpoints are small
        model.requires_grad_(False)
        model.base_model.layers[-6:].requires_grad_(True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moving = {parameter.data_ptr() for parameter in trainable}
    optimizer = torch.optim.AdamW(trainable, lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    trained.past.append({name: weight.clone() for name, weight in model.state_dict().items()})
    for step in range(spec.steps):
        seed = 10**6 * spec.seed + step
        requests = trained.requests(seed, 64)
        rollouts = sampler.generate(requests, Decoding(1.0, spec.longest))
        reward_PG = torch.tensor(trained.rewards(seed, rollouts)).view(-1, 4)
        advantages = rloo(reward_PG).flatten().tolist()
        batch = pack_batch([r.prompt_tokens for r in rollouts], [list(r.tokens) for r in rollouts])
        hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
        logp_TV = (hidden_TH @ head_weight(model).T).log_softmax(-1)
        logp_T = logp_TV.gather(-1, batch.targets_T[:, None]).squeeze(-1)
        loss = -(torch.tensor(batch.of_tokens(advantages)) * logp_T).sum() / len(rollouts)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        weights = {
            name: weight.detach().clone() if weight.data_ptr() in moving else trained.past[-1][name]
            for name, weight in model.state_dict().items()
        }
        trained.past.append(weights)
        sampler.load_weights(weights.items())
        print(f"{spec.name}  step {step + 1}  reward {reward_PG.mean():.3f}", file=sys.stderr, flush=True)
