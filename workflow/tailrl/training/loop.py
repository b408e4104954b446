"""The reinforcement-learning loop of one arm and one seed.

    rollout → reward → advantages → packed micro-batches → log-probs → weights → loss → optimizer → engine

Every random choice is derived from the seed and the step, never from the arm: at the first step all arms
sample the same problems with the same random numbers. What the steps change is the `RunState`: a run that is
interrupted takes up the last one that was saved, and ends as it would have ended.
"""

import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tailrl.artifacts.manifest import read_digests
from tailrl.config.jobs import Run
from tailrl.model.forward import make_exact
from tailrl.model.policy import encode_prompt, load_policy, load_tokenizer, required_length
from tailrl.objective.adaptive_rho import Thresholds
from tailrl.objective.advantages import ESTIMATORS
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import NumericalError, StudyError
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem, read_problems
from tailrl.tasks.scoring import score
from tailrl.tracking.metrics import METRICS
from tailrl.tracking.tracker import Tracker
from tailrl.training.checkpoints import Checkpoints, fingerprint
from tailrl.training.gather import of_all_ranks
from tailrl.training.guarded_engine import Engine
from tailrl.training.kept_data import KeptMetrics, KeptTokens, response_arrays, write_batch
from tailrl.training.optimizer import make_optimizer
from tailrl.training.placement import give_up_forward, place
from tailrl.training.results import give, write_results
from tailrl.training.snapshots import Snapshots
from tailrl.training.state import RunState, seed_libraries
from tailrl.training.step import Sample, update
from tailrl.training.step_record import Stopwatch, response_metrics, reward_metrics
from tailrl.training.stopping import Watch


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same throughout a run: settings, seed, folder of the results, and the problems as tokens."""

    run: Run
    seed: int
    out: Path
    tokenizer: PreTrainedTokenizerBase
    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    decoding: Decoding


def train(run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path, wandb_folder: Path) -> None:
    """Train one arm with one seed; writes `metrics.jsonl`, `tokens.npz`, `run.json` and `policy/` into `out`, and where
    the settings ask for them `snapshots/`.

    Goes on from the last whole state in `out/checkpoints`. Of a run that is finished there are its results alone, which
    are given again where Snakemake has removed them. The batches of skipped updates stay in `out/skipped`.

    Args:
        run: the arm's settings.
        seed: of the order of the problems and of every sampled token.
        policy_folder: the policy to start from, in Hugging Face format.
        problems_file: JSONL of problems.
        out: where the results go.
        wandb_folder: where W&B keeps its files.

    Raises:
        StudyError: an unreadable input, a prompt too long for the policy, an engine that fails twice, too many skipped
            updates in a row, a state that cannot be saved.
    """
    started = time.perf_counter()
    job = _read_job(run, seed, policy_folder, problems_file, out)
    identity = fingerprint(run, seed, policy_folder, problems_file)
    checkpoints = Checkpoints(out / "checkpoints", run.training.keep_checkpoints, identity)
    distributed.join()
    with checkpoints.held() if distributed.is_first() else nullcontext():
        # What the first rank finds, which holds the folder.
        if not distributed.said(checkpoints.finished.is_dir())[0]:
            _train(job, policy_folder, checkpoints, wandb_folder, started)
        elif distributed.is_first():
            # A file has a second name, by which something may have changed it.
            read_digests(checkpoints.finished, checkpoints.finished)
            print(f"tailrl: {out}: this run is finished; its results are given again", file=sys.stderr, flush=True)
        if distributed.is_first():
            give(checkpoints.finished, out)
            checkpoints.clear()


def _train(job: Job, policy_folder: Path, checkpoints: Checkpoints, wandb_folder: Path, started: float) -> None:
    run, settings = job.run, job.run.training
    model = load_policy(policy_folder)
    if run.sampler.exact:
        if distributed.count() > 1:
            raise StudyError(
                f"arm {run.arm}: an engine with the trainer's own bits needs the whole policy: run it with 1 rank"
            )
        make_exact(model)
    place(model, settings, run.sampler.exact)
    length = required_length(job.problems, job.prompts, settings.max_new_tokens, model.config)
    engine = Engine(
        lambda: make_sampler(run.sampler, policy_folder, length, job.seed, model),
        run.disturbance,
        settings.rollout_timeout,
    )
    thresholds = Thresholds(run.vocabulary, model.config.vocab_size)
    kept = KeptMetrics(checkpoints.folder, checkpoints.name), KeptTokens(checkpoints.folder, checkpoints.name)
    state = RunState(model, make_optimizer(model, settings), engine.hand_over, thresholds, *kept)
    snapshots = Snapshots(checkpoints.folder, checkpoints.name, settings.snapshots)
    resumed = checkpoints.resume(state)
    tested = _start_engine(engine, job, state, resumed)
    order = islice(problem_order(len(job.problems), settings.prompts, job.seed), state.step, None)
    state.startup_seconds += time.perf_counter() - started
    started -= state.wall_seconds
    between_steps, most = 0.0, min(settings.max_skipped, settings.steps)
    recorded = state.metrics.read()
    watch = Watch(settings, recorded)
    first = distributed.is_first()
    with Tracker(run, job.seed, job.out, wandb_folder, recorded) if first else nullcontext() as tracker:
        while state.step < settings.steps and not watch.alarm():
            metrics, fault = take_step(job, state, engine, next(order), between_steps)
            begun = time.perf_counter()
            watch.see(metrics)
            if tracker is not None:
                tracker.log(metrics)
                state.metrics.add(metrics)
            state.step += 1
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if fault else 0
            state.wall_seconds = begun - started
            stuck = state.skipped_in_a_row >= most
            snapshots.keep(state.step, model, job.tokenizer)
            if stuck or state.step % settings.checkpoint_every == 0:
                saved = checkpoints.save(state)
            if stuck:
                raise StudyError(f"{fault}; {state.skipped_in_a_row} in a row: the run stops, its state is in {saved}")
            between_steps = time.perf_counter() - begun
    if state.skipped_in_a_row >= most:
        # It stopped so in its last step, and was started again.
        raise StudyError(f"{job.out}: the last {state.skipped_in_a_row} updates were skipped for a NaN or Inf")
    state.wall_seconds = time.perf_counter() - started
    if (stopped := watch.alarm()) and first:
        print(f"tailrl: arm {run.arm}, seed {job.seed}: {stopped}", file=sys.stderr, flush=True)
    found = {
        "fingerprint": checkpoints.fingerprint,
        "sampler_self_test": tested if math.isfinite(tested) else None,
        "stopped": stopped,
    }
    write_results(state, job.tokenizer, run, job.seed, found, checkpoints.finished, snapshots)


def take_step(
    job: Job, state: RunState, engine: Engine, chosen: Sequence[int], between_steps: float
) -> tuple[dict[str, float], str | None]:
    """One step, from the problems to the weights in the engine.

    Args:
        job: what stays the same.
        state: what changes; its step and lines are the caller's to move on.
        engine: samples with the weights that it was handed.
        chosen: the indices of the step's problems.
        between_steps: seconds that the logging and saving after the step before took: they are booked on this one.

    Returns:
        The step's metrics, and where the update was skipped, the sentence that says why.
    """
    run, settings, step = job.run, job.run.training, state.step
    together = run.sampler.tensor_parallel
    watch, begun = Stopwatch(), time.perf_counter()
    seed_libraries(derive_seed("libraries", job.seed, step))
    for group in state.optimizer.param_groups:
        group["lr"] = settings.learning_rate * min(1.0, (step + 1) / (settings.warmup_steps + 1))
    thresholds = [state.thresholds.of(problem) for problem in chosen]
    requests = step_requests([job.prompts[i] for i in chosen], thresholds, settings.group_size, job.seed, step)
    with watch.phase("rollout"):
        rollouts = engine.generate(distributed.share(requests, together), job.decoding, state.model)
    with watch.phase("reward"):
        posed = distributed.share([job.problems[i] for i in chosen for _ in range(settings.group_size)], together)
        scored = rewards(rollouts, posed, job.tokenizer)
        rollouts, rewards_B = of_all_ranks(requests, rollouts, scored, together)
        rewards_PG = rewards_B.reshape(settings.prompts, settings.group_size)
    advantages = ESTIMATORS[run.estimator](torch.from_numpy(rewards_PG)).flatten().tolist()
    samples = [
        Sample(rollout, advantage, request.threshold, request.seed)
        for rollout, advantage, request in zip(rollouts, advantages, requests, strict=True)
    ]
    fault, updated = None, None
    try:
        deal = derive_seed("deal", job.seed, step)
        updated = update(state.model, state.optimizer, samples, run, deal, watch, engine.hand_over.delayed)
    except NumericalError as error:
        fault = _skip(job, state, samples, error)
    with watch.phase("weights"), engine.in_time("the hand-over of the weights"):
        engine.hand_over(state.model)
    with watch.phase("metrics"):
        metrics = dict.fromkeys(METRICS, math.nan) | {
            "train/step": float(step),
            "train/skipped": float(fault is not None),
            "train/learning_rate": state.optimizer.param_groups[0]["lr"],
            "dvp/threshold": float(np.mean(thresholds)),
            **reward_metrics(rewards_PG),
            **response_metrics(rollouts),
            **engine.sampler.metrics(),
        }
        if updated is not None:
            loss, norm, record = updated
            metrics |= {"train/loss": loss, "train/grad_norm": norm, **record.metrics()}
            if distributed.is_first() and (step % settings.keep_tokens_every == 0 or not state.tokens.checksums):
                kept = record.tokens() | response_arrays(record.order(), rollouts, advantages, rewards_B)
                state.tokens.keep(step, {"step": np.full(len(kept["outside"]), step, np.int32), **kept})
    watch.seconds["metrics"] += between_steps
    elapsed = time.perf_counter() - begun + between_steps
    metrics |= {f"time/{name}": seconds for name, seconds in watch.seconds.items()} | {"time/step": elapsed}
    metrics["throughput/tokens_per_second"] = sum(len(r.tokens) for r in rollouts) / elapsed
    # The first rank's, whose clock counts: whatever a run decides by a number, every rank decides by the same one.
    metrics = distributed.said(metrics)[0]
    if updated is not None:
        lost_mass = metrics["dvp/lost_mass_per_response"]
        state.thresholds.observe(chosen, rewards_PG.mean(axis=1).tolist(), lost_mass)
    return metrics, fault


def _skip(job: Job, state: RunState, samples: Sequence[Sample], error: NumericalError) -> str:
    """Drop the gradient, keep the batch, say so; returns the sentence."""
    give_up_forward(state.model)
    state.optimizer.zero_grad(set_to_none=True)
    file = job.out / "skipped" / f"step-{state.step:08d}.npz"
    where = f"arm {job.run.arm}, seed {job.seed}, step {state.step}"
    sentence = f"{where}: the update is skipped, for {error}; its batch is in {file}"
    if distributed.is_first():
        write_batch(samples, file)
        print(f"tailrl: {sentence}", file=sys.stderr, flush=True)
    return sentence


# --- before the steps and after them -----------------------------------------------------------------


def _read_job(run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path) -> Job:
    tokenizer, problems = load_tokenizer(policy_folder), read_problems(problems_file)
    prompts = [tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems]
    rule = "full" if run.vocabulary.side == "trainer" else run.vocabulary.rule
    decoding = Decoding(run.training.temperature, run.training.max_new_tokens, rule, run.disturbance)
    return Job(run, seed, out, tokenizer, problems, prompts, decoding)


def _start_engine(engine: Engine, job: Job, state: RunState, resumed: bool) -> float:
    """Hand the engine its first weights and test it; returns what its self-test found."""
    run, size = job.run, state.model.config.vocab_size
    if run.floor_defeats_pruning(size) and distributed.is_first():
        warnings.warn(
            f"arm {run.arm}: the floor of {run.disturbance.floor:g} lifts every token over the cut of "
            f"{run.vocabulary.rule}, which prunes nothing on the disturbed side at the rho that it starts from",
            stacklevel=1,
        )
    hand_over = engine.hand_over.again if resumed else engine.hand_over
    with engine.in_time("the hand-over of the weights"):
        hand_over(state.model)
    prompts = job.prompts[:4]
    requests = step_requests(prompts, [state.thresholds.of(0)] * len(prompts), 2, job.seed, step=-1)
    with engine.in_time("the engine's self-test"):
        tested = engine.sampler.self_test(requests, job.decoding)
    if resumed:
        # As after any other step: without what the engine cached in its test.
        with engine.in_time("the hand-over of the weights"):
            engine.hand_over.again(state.model)
    return float(max(distributed.said(tested)))


# --- parts of a step ---------------------------------------------------------------------------------


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
    rollouts: Sequence[Rollout], problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> NDArray[np.float32]:
    """1 for a right answer to its problem, else 0: float32, one a rollout."""
    texts = tokenizer.batch_decode([rollout.tokens for rollout in rollouts], skip_special_tokens=True)
    pairs = zip(texts, problems, strict=True)
    return np.array([score(text, problem.answer, problem.compared) for text, problem in pairs], dtype=np.float32)
