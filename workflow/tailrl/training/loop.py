"""The reinforcement-learning loop of one arm and one seed.

    rollout → reward → advantages → packed micro-batches → log-probs → weights → loss → AdamW → weights to the engine

Every random choice is derived from the seed and the step, never from the arm: at the first step all arms
sample the same problems with the same random numbers.
"""

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tailrl.errors import StudyError
from tailrl.objective.advantages import ESTIMATORS
from tailrl.policy import EXACT_ATTENTION, encode_prompt, load_policy, load_tokenizer, required_length, save_policy
from tailrl.provenance import provenance
from tailrl.records import Request, Rollout, read_problems
from tailrl.rollout import Decoding, make_sampler
from tailrl.seeding import derive_seed
from tailrl.settings import Run
from tailrl.tasks.scoring import score
from tailrl.tracking import Tracker
from tailrl.training.handover import Handover
from tailrl.training.step import Sample, Stopwatch, update
from tailrl.training.thresholds import Thresholds


def train(run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path, wandb_folder: Path) -> None:
    """Train one arm with one seed; writes `metrics.jsonl`, `tokens.npz`, `run.json` and `policy/` into `out`.

    Args:
        run: the arm's settings.
        seed: of the order of the problems and of every sampled token.
        policy_folder: the policy to start from, in Hugging Face format.
        problems_file: JSONL of problems.
        out: where the results go.
        wandb_folder: where W&B keeps its files.

    Raises:
        StudyError: an unreadable input, a prompt too long for the policy, a loss that is not finite.
    """
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    settings = run.training
    tokenizer = load_tokenizer(policy_folder)
    problems = read_problems(problems_file)
    prompts = [tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems]
    model = load_policy(policy_folder)
    if run.sampler.exact:
        model.set_attn_implementation(EXACT_ATTENTION)
    length = required_length(problems, prompts, settings.max_new_tokens, model.config)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    sampler = make_sampler(run.sampler, policy_folder, length, seed, model)
    hand_over = Handover(sampler, run.disturbance)
    hand_over(model)
    thresholds = Thresholds(run.vocabulary, model.config.vocab_size)
    if run.floor_defeats_pruning(model.config.vocab_size):
        warnings.warn(
            f"arm {run.arm}: the floor of {run.disturbance.floor:g} lifts every token over the cut of "
            f"{run.vocabulary.rule}, which prunes nothing on the disturbed side at the rho that it starts from",
            stacklevel=1,
        )
    rule = "full" if run.vocabulary.side == "trainer" else run.vocabulary.rule
    decoding = Decoding(settings.temperature, settings.max_new_tokens, rule, run.disturbance)
    order = problem_order(len(problems), settings.prompts, seed)
    tested = sampler.self_test(
        step_requests(prompts[:4], [thresholds.of(0)] * len(prompts[:4]), 2, seed, step=-1), decoding
    )
    tokens: list[dict[str, NDArray[Any]]] = []
    startup = time.perf_counter() - started
    logging_seconds = 0.0
    with Tracker(run, seed, out, wandb_folder) as tracker:
        for step in range(settings.steps):
            watch, begun, chosen = Stopwatch(), time.perf_counter(), next(order)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * min(1.0, (step + 1) / (settings.warmup_steps + 1))
            given = [thresholds.of(problem) for problem in chosen]
            requests = step_requests([prompts[i] for i in chosen], given, settings.group_size, seed, step)
            with watch.phase("rollout"):
                rollouts = sampler.generate(requests, decoding)
            with watch.phase("reward"):
                answers = [problems[i].answer for i in chosen for _ in range(settings.group_size)]
                rewards_PG = rewards(rollouts, answers, tokenizer).reshape(settings.prompts, settings.group_size)
            advantages = ESTIMATORS[run.estimator](torch.from_numpy(rewards_PG)).flatten().tolist()
            samples = [
                Sample(rollout, advantage, request.threshold, request.seed)
                for rollout, advantage, request in zip(rollouts, advantages, requests, strict=True)
            ]
            try:
                deal = derive_seed("deal", seed, step)
                loss, norm, record = update(model, optimizer, samples, run, deal, watch, hand_over.delayed)
            except StudyError as error:
                raise StudyError(f"arm {run.arm}, seed {seed}, step {step}: {error}") from None
            with watch.phase("weights"):
                hand_over(model)
            with watch.phase("metrics"):
                metrics = {
                    "train/step": float(step),
                    "train/loss": loss,
                    "train/grad_norm": norm,
                    "train/learning_rate": optimizer.param_groups[0]["lr"],
                    "dvp/threshold": float(np.mean(given)),
                    **_reward_metrics(rewards_PG),
                    **_response_metrics(rollouts),
                    **record.metrics(),
                    **sampler.metrics(),
                }
                thresholds.observe(chosen, rewards_PG.mean(axis=1).tolist(), metrics["dvp/lost_mass_per_response"])
                if step % settings.keep_tokens_every == 0:
                    kept = record.tokens()
                    tokens.append({"step": np.full(len(kept["outside"]), step, np.int32), **kept})
            # A step's logging ends after its record is closed: it is booked on the next one.
            watch.seconds["metrics"] += logging_seconds
            elapsed = time.perf_counter() - begun + logging_seconds
            metrics |= {f"time/{name}": seconds for name, seconds in watch.seconds.items()} | {"time/step": elapsed}
            metrics["throughput/tokens_per_second"] = sum(len(r.tokens) for r in rollouts) / elapsed
            logged = time.perf_counter()
            tracker.log(metrics)
            logging_seconds = time.perf_counter() - logged
    np.savez_compressed(out / "tokens.npz", **{name: np.concatenate([t[name] for t in tokens]) for name in tokens[0]})
    save_policy(model, tokenizer, out / "policy")
    seconds = {"startup_seconds": round(startup, 3), "wall_seconds": round(time.perf_counter() - started, 3)}
    _write_run(out / "run.json", run, seed, {**seconds, "sampler_self_test": tested})


def problem_order(count: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Indices of the problems of each step: a problem at most once an epoch, in an order of the seed's own."""
    if per_step > count:
        raise StudyError(f"training.prompts: {per_step} different problems a step, but the task has {count}")
    epoch = 0
    while True:
        order = np.random.default_rng(derive_seed("problems", seed, epoch)).permutation(count)
        for start in range(0, count - per_step + 1, per_step):
            yield [int(i) for i in order[start : start + per_step]]
        epoch += 1


def step_requests(
    prompts: Sequence[tuple[int, ...]], thresholds: Sequence[float], group_size: int, seed: int, step: int
) -> list[Request]:
    """The requests of a step, `group_size` for each prompt in turn, each with a random stream of its own."""
    return [
        Request(prompt, derive_seed("rollout", seed, step, place, member), threshold)
        for place, (prompt, threshold) in enumerate(zip(prompts, thresholds, strict=True))
        for member in range(group_size)
    ]


def rewards(
    rollouts: Sequence[Rollout], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> NDArray[np.float32]:
    """1 for a right answer, else 0: float32, one a rollout."""
    texts = tokenizer.batch_decode([rollout.tokens for rollout in rollouts], skip_special_tokens=True)
    return np.array([score(text, answer) for text, answer in zip(texts, answers, strict=True)], dtype=np.float32)


def _reward_metrics(rewards_PG: NDArray[np.float32]) -> dict[str, float]:
    means_P = rewards_PG.mean(axis=1)
    return {
        "reward/mean": float(means_P.mean()),
        "reward/all_right_fraction": float((means_P == 1).mean()),
        "reward/all_wrong_fraction": float((means_P == 0).mean()),
    }


def _response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        "response/length_mean": float(np.mean(lengths)),
        "response/length_max": float(max(lengths)),
        "response/stopped_fraction": float(np.mean([rollout.stopped for rollout in rollouts])),
    }


def _write_run(path: Path, run: Run, seed: int, measured: dict[str, float]) -> None:
    record = {
        "study": run.study,
        "arm": run.arm,
        "seed": seed,
        "settings": run.model_dump(mode="json"),
        **provenance(),
        "threads": torch.get_num_threads(),
        **measured,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
