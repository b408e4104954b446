"""The reinforcement-learning loop of one arm and one seed.

    rollout → reward → advantages → packed micro-batches → log-probs → weights → loss → optimizer → engine

Every random choice depends on the seed and the step, never on the arm: at the first step all arms sample the same
problems with the same random numbers. The steps change only the `RunState`. An interrupted run resumes from the last
saved one, and ends with the same bits.
"""

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.artifacts.manifest import read_digests
from tailrl.config.jobs import Run
from tailrl.model.forward import trained_length
from tailrl.model.policy import encode_prompt, load_policy, load_tokenizer, required_length
from tailrl.model.quantized import check_sizes, control_rounds_queries, match_engine, round_activations
from tailrl.objective.adaptive_rho import Thresholds
from tailrl.objective.advantages import advantages_of
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.prompts import first_prompt, show_prompts
from tailrl.rollout.sampling import stop_tokens
from tailrl.runtime import distributed
from tailrl.runtime.errors import NumericalError, StudyError, say
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem, read_problems
from tailrl.tracking import metrics as keys
from tailrl.tracking.tracker import Tracker
from tailrl.training.checkpoints import Checkpoints, fingerprint
from tailrl.training.guarded_engine import GuardedEngine
from tailrl.training.kept_data import KeptMetrics, KeptTokens, response_arrays, write_batch
from tailrl.training.optimizer import make_optimizer
from tailrl.training.placement import decided, give_up_forward, number_formats, place
from tailrl.training.reference import NamedWeights, reference_weights, with_reference
from tailrl.training.results import give, write_results
from tailrl.training.rollouts import ProblemOrder, of_all_ranks, rewards, step_requests
from tailrl.training.snapshots import Snapshots
from tailrl.training.state import RunState, seed_libraries
from tailrl.training.step import Sample, update
from tailrl.training.step_record import Stopwatch, response_metrics, reward_metrics
from tailrl.training.stopping import Watch


@dataclass(frozen=True, slots=True)
class Job:
    """The constants of a run: settings, seed, folder of the results, the problems as tokens, the reference policy."""

    run: Run
    seed: int
    out: Path
    tokenizer: PreTrainedTokenizerBase
    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    decoding: Decoding
    reference: NamedWeights


def train(run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path, wandb_folder: Path) -> None:
    """Train one arm with one seed; writes `metrics.jsonl`, `tokens.npz`, `run.json` and `policy/` into `out`, and
    `snapshots/` where the settings ask for them.

    Resumes from the last whole state in `out/checkpoints`. A finished run is not retrained; its results are restored
    where Snakemake removed them. The batches of skipped updates stay in `out/skipped`.

    Args:
        run: the arm's settings.
        seed: of the order of the problems and of every sampled token.
        policy_folder: the policy to start from, in Hugging Face format.
        problems_file: JSONL of problems.
        out: folder of the results.
        wandb_folder: folder of W&B's files.

    Raises:
        StudyError: an unreadable input, a prompt too long for the policy, an engine that fails twice, too many skipped
            updates in a row, a state that cannot be saved.
    """
    started = time.perf_counter()
    run = decided(run)
    job = _read_job(run, seed, policy_folder, problems_file, out)
    identity = fingerprint(run, seed, policy_folder, problems_file, job.prompts)
    checkpoints = Checkpoints(out / "checkpoints", run.training.keep_checkpoints, identity)
    distributed.join()
    with checkpoints.held() if distributed.is_first() else nullcontext():
        checkpoints.take_up_older()
        # The first rank decides, since it holds the folder.
        if not distributed.gathered(checkpoints.finished.is_dir())[0]:
            _train(job, policy_folder, checkpoints, wandb_folder, started)
        elif distributed.is_first():
            # Its files have second names, by which something may have changed them.
            read_digests(checkpoints.finished, checkpoints.finished)
            say(f"{out}: this run is finished; its results are restored")
        if distributed.is_first():
            give(checkpoints.finished, out)
            checkpoints.clear()


def _load(job: Job, policy_folder: Path) -> PreTrainedModel:
    """The policy where the run trains it, in its number format."""
    run, model = job.run, load_policy(policy_folder)
    if (run.sampler.exact or run.sampler.few_bit_trainer) and distributed.count() > 1:
        raise StudyError(
            f"arm {run.arm}: an engine with the trainer's own bits, or a trainer with the engine's few bits, needs the "
            "whole policy: run it with 1 rank"
        )
    if run.sampler.exact:
        match_engine(model, run.sampler)
    elif run.sampler.few_bit_trainer and run.sampler.formats:
        formats = run.sampler.formats
        check_sizes(model, formats)
        round_activations(model, formats, control_rounds_queries(formats))
    place(model, run.training)
    if (formats := number_formats(run)) and distributed.is_first():
        say(f"arm {run.arm}, seed {job.seed}: {formats}")
    return model


def _train(job: Job, policy_folder: Path, checkpoints: Checkpoints, wandb_folder: Path, started: float) -> None:
    run, settings = job.run, job.run.training
    if distributed.is_first():
        ends = stop_tokens(policy_folder, job.tokenizer)
        show_prompts(job.tokenizer, job.prompts, ends, f"arm {run.arm}, seed {job.seed}")
    model = _load(job, policy_folder)
    most, key = trained_length(model.config), "training.max_new_tokens"
    length = required_length(job.problems, job.prompts, settings.max_new_tokens, most, key)
    engine = GuardedEngine(
        lambda: make_sampler(run.sampler, policy_folder, length, job.seed, model),
        run.disturbance,
        settings.rollout_timeout,
    )
    thresholds = Thresholds(run.vocabulary, model.config.vocab_size)
    kept = KeptMetrics(checkpoints.folder, checkpoints.name), KeptTokens(checkpoints.folder, checkpoints.name)
    state = RunState(model, make_optimizer(model, settings), engine.weight_sync, thresholds, *kept)
    snapshots = Snapshots(checkpoints.folder, checkpoints.name, settings.snapshots, getattr(torch, run.policy_dtype))
    resumed = checkpoints.resume(state)
    tested = _start_engine(engine, job, state, resumed)
    state.startup_seconds += time.perf_counter() - started
    started -= state.wall_seconds
    between_steps, most = 0.0, min(settings.max_skipped, settings.steps)
    recorded = state.metrics.read()
    watch, order = Watch(settings, recorded), ProblemOrder(job.problems, run, job.seed, recorded)
    first = distributed.is_first()
    with Tracker(run, job.seed, job.out, wandb_folder, recorded) if first else nullcontext() as tracker:
        while state.step < settings.steps and not watch.alarm():
            metrics, fault = take_step(job, state, engine, order.next(), between_steps)
            begun = time.perf_counter()
            watch.see(metrics)
            metrics |= order.see(metrics)
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
        raise StudyError(f"{job.out}: the last {state.skipped_in_a_row} updates were skipped for a NaN or Inf")
    state.wall_seconds = time.perf_counter() - started
    if (stopped := watch.alarm()) and first:
        say(f"arm {run.arm}, seed {job.seed}: {stopped}")
    found = {
        "fingerprint": checkpoints.fingerprint,
        "sampler_self_test": tested if math.isfinite(tested) else None,
        "stopped": stopped,
        "first_prompt": first_prompt(job.tokenizer, job.prompts),
    }
    write_results(state, job.tokenizer, run, job.seed, found, checkpoints.finished, snapshots)


def take_step(
    job: Job, state: RunState, engine: GuardedEngine, chosen: Sequence[int], between_steps: float
) -> tuple[dict[str, float], str | None]:
    """One step, from the problems to the weights in the engine.

    Args:
        job: the run's constants.
        state: what the step changes, except its step and metrics, which the caller updates.
        engine: samples with the weights that it has.
        chosen: the indices of the step's problems.
        between_steps: seconds of logging and saving after the previous step; they count towards this one.

    Returns:
        The step's metrics, and the reason of a skipped update.
    """
    run, settings, step = job.run, job.run.training, state.step
    watch, begun = Stopwatch(), time.perf_counter()
    seed_libraries(derive_seed("libraries", job.seed, step))
    for group in state.optimizer.param_groups:
        group["lr"] = settings.learning_rate * min(1.0, (step + 1) / (settings.warmup_steps + 1))
    samples, rewards_PG = _sample(job, state, engine, chosen, watch)
    rollouts = [sample.rollout for sample in samples]
    fault, updated, sync = None, None, engine.weight_sync
    try:
        deal = derive_seed("deal", job.seed, step)
        samples = with_reference(state.model, samples, rewards_PG, run, job.reference, watch, sync.delayed)
        updated = update(state.model, state.optimizer, samples, run, deal, watch, sync.delayed)
    except NumericalError as error:
        fault = _skip(job, state, samples, error)
    with watch.phase("weights"), engine.in_time("the hand-over of the weights"):
        sync(state.model)
    with watch.phase("metrics"):
        metrics = dict.fromkeys([*keys.METRICS, *(keys.ROUTING if run.sampler.says_routes else ())], math.nan) | {
            keys.STEP: float(step),
            keys.SKIPPED: float(fault is not None),
            keys.LEARNING_RATE: state.optimizer.param_groups[0]["lr"],
            keys.THRESHOLD: float(np.mean([sample.threshold for sample in samples[:: settings.group_size]])),
            **reward_metrics(rewards_PG),
            **response_metrics(rollouts),
            **engine.sampler.metrics(),
        }
        if updated is not None:
            loss, norm, record = updated
            metrics |= {keys.LOSS: loss, keys.GRADIENT_NORM: norm, **record.metrics(run.correction)}
            if distributed.is_first() and (step % settings.keep_tokens_every == 0 or not state.tokens.checksums):
                advantages, rewards_B = [sample.advantage for sample in samples], rewards_PG.ravel()
                kept = record.tokens() | response_arrays(record.order(), rollouts, advantages, rewards_B)
                state.tokens.keep(step, {"step": np.full(len(kept["outside"]), step, np.int32), **kept})
    seconds = watch.read()
    seconds["metrics"] += between_steps
    elapsed = time.perf_counter() - begun + between_steps
    metrics |= {keys.in_group(keys.TIME, phase): spent for phase, spent in seconds.items()}
    metrics[keys.STEP_SECONDS] = elapsed
    metrics[keys.TOKENS_PER_SECOND] = sum(len(r.tokens) for r in rollouts) / elapsed
    # All ranks take the first one's numbers, times included, and so decide the same.
    metrics = distributed.gathered(metrics)[0]
    if updated is not None:
        lost_mass = metrics[keys.LOST_MASS]
        state.thresholds.observe(chosen, rewards_PG.mean(axis=1).tolist(), lost_mass)
    return metrics, fault


def _sample(
    job: Job, state: RunState, engine: GuardedEngine, chosen: Sequence[int], watch: Stopwatch
) -> tuple[list[Sample], NDArray[np.float32]]:
    """The responses of a step, as all ranks sampled them, and their rewards, a row for each of its problems."""
    run, settings, together = job.run, job.run.training, job.run.sampler.sharing
    thresholds = [state.thresholds.of(problem) for problem in chosen]
    requests = step_requests([job.prompts[i] for i in chosen], thresholds, settings.group_size, job.seed, state.step)
    with watch.phase("rollout"):
        rollouts = engine.generate(distributed.share(requests, together), job.decoding, state.model)
        with engine.in_time("the engine's sleep"):
            engine.sampler.release()
    with watch.phase("reward"):
        posed = distributed.share([job.problems[i] for i in chosen for _ in range(settings.group_size)], together)
        scored = rewards(rollouts, posed, job.tokenizer)
        rollouts, rewards_B = of_all_ranks(rollouts, scored, together)
        rewards_PG = rewards_B.reshape(settings.prompts, settings.group_size)
    advantages = advantages_of(run.estimator, torch.from_numpy(rewards_PG)).flatten().tolist()
    age = min(state.step, run.disturbance.staleness)  # the first steps sample with the base policy
    samples = [
        Sample(rollout, advantage, request.threshold, request.seed, age=age)
        for rollout, advantage, request in zip(rollouts, advantages, requests, strict=True)
    ]
    return samples, rewards_PG


def _skip(job: Job, state: RunState, samples: Sequence[Sample], error: NumericalError) -> str:
    """Drop the gradient and keep the batch; prints and returns the reason."""
    give_up_forward(state.model)
    state.optimizer.zero_grad(set_to_none=True)
    file = job.out / "skipped" / f"step-{state.step:08d}.npz"
    where = f"arm {job.run.arm}, seed {job.seed}, step {state.step}"
    sentence = f"{where}: the update is skipped, for {error}; its batch is in {file}"
    if distributed.is_first():
        write_batch(samples, file)
        say(sentence)
    return sentence


def _read_job(run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path) -> Job:
    tokenizer, problems = load_tokenizer(policy_folder), read_problems(problems_file)
    prompts = [tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems]
    longest, rule = run.training.max_new_tokens, run.vocabulary.sampler_rule
    keep_every = int(run.needs_distributions)
    decoding = Decoding(run.training.temperature, longest, rule, run.disturbance, keep_every=keep_every)
    return Job(run, seed, out, tokenizer, problems, prompts, decoding, reference_weights(run, policy_folder))


def _start_engine(engine: GuardedEngine, job: Job, state: RunState, resumed: bool) -> float:
    """Give the engine its first weights and test it; returns its self-test's largest error over all ranks, nats."""
    run, size = job.run, state.model.config.vocab_size
    if run.floor_defeats_pruning(size) and distributed.is_first():
        warnings.warn(
            f"arm {run.arm}: the floor of {run.disturbance.floor:g} lifts every token over the cut of "
            f"{run.vocabulary.rule}, which prunes nothing on the disturbed side at the rho that it starts from",
            stacklevel=1,
        )
    weight_sync = engine.weight_sync.again if resumed else engine.weight_sync
    with engine.in_time("the hand-over of the weights"):
        weight_sync(state.model)
    prompts = job.prompts[:4]
    requests = step_requests(prompts, [state.thresholds.of(0)] * len(prompts), 2, job.seed, step=-1)
    with engine.in_time("the engine's self-test"):
        tested = engine.sampler.self_test(requests, job.decoding)
    if resumed:
        # Drops what the engine cached in its test.
        with engine.in_time("the hand-over of the weights"):
            engine.weight_sync.again(state.model)
    return float(max(distributed.gathered(tested)))
