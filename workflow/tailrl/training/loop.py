"""The reinforcement-learning loop of one arm and one seed. `training.step` has what a step does.

Every random choice depends on the seed and the step, never on the arm: at the first step all arms sample the same
problems with the same random numbers. The steps change only the `RunState`. An interrupted run resumes from the last
saved one, and ends with the same bits.
"""

import math
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tailrl.artifacts.manifest import read_digests
from tailrl.config.jobs import Run
from tailrl.model.forward import trained_length
from tailrl.model.policy import encode_prompt, load_policy, load_tokenizer, required_length
from tailrl.model.quantized import check_sizes, control_rounds_queries, match_engine, round_activations
from tailrl.objective.adaptive_rho import Thresholds
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.prompts import first_prompt, show_prompts
from tailrl.rollout.sampling import stop_tokens
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError, ModelError, say
from tailrl.tasks.problem import read_problems
from tailrl.tracking.tracker import Tracker
from tailrl.training.checkpoints import Checkpoints, fingerprint
from tailrl.training.guarded_engine import GuardedEngine
from tailrl.training.kept_data import KeptMetrics, KeptTokens
from tailrl.training.optimizer import make_optimizer
from tailrl.training.placement import decided, number_formats, place
from tailrl.training.reference import reference_weights
from tailrl.training.results import give, write_results
from tailrl.training.rollouts import ProblemOrder, step_requests
from tailrl.training.scorer import make_scorer
from tailrl.training.snapshots import Snapshots
from tailrl.training.state import RunState
from tailrl.training.step import Job, take_step
from tailrl.training.stopping import Watch


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
        who = "an engine with the trainer's own bits" if run.sampler.exact else "a trainer with the engine's few bits"
        raise ConfigurationError(f"arm {run.arm}: {who} needs the whole policy: run it with 1 rank")
    if run.sampler.exact:
        match_engine(model, run.sampler)
    elif run.sampler.few_bit_trainer and run.sampler.formats:
        check_sizes(model, run.sampler.formats)
        round_activations(model, run.sampler.formats, control_rounds_queries(run.sampler.formats))
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
                raise ModelError(f"{fault}; {state.skipped_in_a_row} in a row: the run stops, its state is in {saved}")
            between_steps = time.perf_counter() - begun
    if state.skipped_in_a_row >= most:
        raise ModelError(f"{job.out}: the last {state.skipped_in_a_row} updates were skipped for a NaN or Inf")
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


def _read_job(run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path) -> Job:
    tokenizer, problems = load_tokenizer(policy_folder), read_problems(problems_file)
    prompts = [tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems]
    longest, rule = run.training.max_new_tokens, run.vocabulary.sampler_rule
    keep_every = int(run.needs_distributions)
    decoding = Decoding(run.training.temperature, longest, rule, run.disturbance, keep_every=keep_every)
    return Job(
        run=run,
        seed=seed,
        out=out,
        tokenizer=tokenizer,
        problems=problems,
        prompts=prompts,
        decoding=decoding,
        scorer=make_scorer(run),
        reference=reference_weights(run, policy_folder),
    )


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
