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
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from exams.tasks import TASKS, Task, problems
from tailrl.config.policy import ScratchPolicy, WarmStart
from tailrl.config.sampler import TransformersSettings
from tailrl.config.tasks.words import WordsTask
from tailrl.kernels.packing import micro_batches, pack_batch
from tailrl.model.forward import PACKED_ATTENTION, head_weight, hidden_states
from tailrl.model.policy import create_policy, encode_prompt, load_policy, load_tokenizer, save_policy
from tailrl.model.tokenizer import train_tokenizer
from tailrl.objective.advantages import rloo
from tailrl.rollout import Decoding
from tailrl.rollout.transformers import TransformersSampler
from tailrl.rollout.types import Request
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
    set: Literal["settle", "judge"]
    task: Task
    kind: Literal["llama", "qwen3", "mixture", "pretrained"]
    seed: int
    hidden: int = 128
    layers: int = 4
    vocabulary: int = 2048
    steps: int = 24
    learning_rate: float = 3e-4
    responses: int = 96
    longest: int = 64
    vllm: bool = False


def in_words(spec: Spec) -> str:
    """What a policy does and how large it is, for a reader."""
    if spec.kind == "pretrained":
        return f"{TASKS[spec.task]}: SmolLM2-135M, a pretrained transformer of 135 million parameters"
    kinds = {"mixture": "a mixture of 8 experts, two a token", "qwen3": "a Qwen3", "llama": "a Llama"}
    kind = kinds[spec.kind]
    return (
        f"{TASKS[spec.task]}: {kind}, {spec.layers} layers, {spec.hidden} numbers a token between them, "
        f"{spec.vocabulary:,} different tokens; trained here from nothing, then {spec.steps} steps of RLOO"
    )


SPECS = (
    Spec("numbers_96", "settle", "numbers", "llama", 52, hidden=96, layers=3, vocabulary=600, vllm=True),
    Spec("reverse_mixture", "settle", "reverse", "mixture", 32, layers=2, vocabulary=700),
    Spec("doubles_128", "settle", "doubles", "llama", 61, layers=4, vocabulary=650),
    Spec("signs_mixture", "settle", "signs", "mixture", 62, hidden=96, layers=3, vocabulary=720, vllm=True),
    Spec("words_160", "settle", "words", "llama", 21, hidden=160, layers=3, vocabulary=1500),
    Spec("smollm2", "settle", "words", "pretrained", 23, steps=0, responses=12, longest=24, vllm=True),
    Spec("evens_qwen3", "judge", "evens", "qwen3", 71, hidden=160, layers=3, vocabulary=560, responses=64, vllm=True),
    Spec(
        "clocks_mixture", "judge", "clocks", "mixture", 72, hidden=96, layers=2, vocabulary=680, responses=64, vllm=True
    ),
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
        sampler = TransformersSampler(
            self.folder, TransformersSettings.model_validate({"engine": "transformers", "dtype": dtype}), 2 * MAX_LENGTH
        )
        sampler.load_weights(self.model.state_dict().items())
        return sampler

    def requests(self, seed: int, count: int, threshold: float = 0.0, group: int = 4) -> list[Request]:
        """`count` requests, `group` a problem; the seed picks the problems."""
        chosen = [self.problems[derive_seed("problem", seed, i // group) % len(self.problems)] for i in range(count)]
        return [
            Request(tuple(encode_prompt(self.tokenizer, problem.prompt)), derive_seed("exam", seed, i), threshold)
            for i, problem in enumerate(chosen)
        ]

    def rewards(self, seed: int, responses: Sequence[Sequence[int]], group: int = 4) -> list[float]:
        """1 or 0 for the response, token ids, to each of the requests of `requests`."""
        found = []
        for i, response in enumerate(responses):
            problem = self.problems[derive_seed("problem", seed, i // group) % len(self.problems)]
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            found.append(score_response(text, problem.answer, problem.compared))
        return found


@torch.no_grad()
def score(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float = 1.0,
    row: int = SCORED_TOKENS,
    set_TV: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The log-probs of each response's tokens, nats, float32, by the packed forward; the weights' dtype computes.

    `set_TV`: for each response, the tokens over which they are renormalised at each position; None: all.
    """
    found: dict[int, Tensor] = {}
    keys = [tuple(prompt) for prompt in prompts]
    for chosen in micro_batches(keys, [len(response) for response in responses], row):
        kept = None if set_TV is None else torch.cat([set_TV[i] for i in chosen])
        scored = _row(model, [keys[i] for i in chosen], [responses[i] for i in chosen], temperature, kept)
        found.update(zip(chosen, scored, strict=True))
    return [found[i] for i in range(len(responses))]


def _row(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
    kept_TV: Tensor | None,
) -> Iterable[Tensor]:
    batch = pack_batch(prompts, [list(response) for response in responses])
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    parts = []
    for begin in range(0, len(hidden_TH), 512):
        hidden_RH, target_R = hidden_TH[begin : begin + 512], batch.targets_T[begin : begin + 512]
        logits_RV = (hidden_RH @ head_weight(model).T).float() / temperature
        if kept_TV is not None:
            logits_RV = logits_RV.masked_fill(~kept_TV[begin : begin + 512], float("-inf"))
        logp_RV = logits_RV.log_softmax(-1)
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
    model = (
        _qwen3(settings, tokenizer, spec.seed)
        if spec.kind == "qwen3"
        else create_policy(settings, tokenizer, spec.seed)
    )
    warm_start(model, tokenizer, lessons, WarmStart(batch=64, learning_rate=3e-3))
    save_policy(model, tokenizer, folder)


def _qwen3(settings: ScratchPolicy, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A dense model of another architecture than the settling ones: with norms of queries and keys, of fewer heads."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=PACKED_ATTENTION,
    )
    return Qwen3ForCausalLM(config)


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
        reward_PG = torch.tensor(trained.rewards(seed, [r.tokens for r in rollouts])).view(-1, 4)
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
