"""An arm trained by verl, in an environment of its own, with the files that a run of our own loop leaves.

The study's problems go to verl as Parquet and the arm's settings as lines of its command (`tailrl.config.verl`). Its
reward is ours (`tailrl.integrations.verl.reward`). While it trains, the log that the plugin writes and verl's own
metrics become `metrics.jsonl`, and behind the last step `tokens.npz`, `policy/` and `run.json`. verl keeps its own
checkpoints, from which an interrupted run goes on. Only files pass between the two environments.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tailrl.artifacts.files import parse_object
from tailrl.config.jobs import Run
from tailrl.config.verl import ACTOR, ROLLOUT, quoted, train_lines
from tailrl.config.vocabulary import log_rho
from tailrl.model.policy import encode_prompt, load_config, load_policy, load_tokenizer, save_policy, whole_weights
from tailrl.objective.advantages import advantages_of
from tailrl.objective.corrections import correct
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.rollout.prompts import first_prompt
from tailrl.rollout.sampling import stop_tokens
from tailrl.runtime.errors import ConfigurationError, DataError, ModelError, reason, say, writing
from tailrl.runtime.launch import run_beside
from tailrl.tasks.problem import Problem, read_problems
from tailrl.tracking import metrics as keys
from tailrl.tracking.tracker import Tracker
from tailrl.training.checkpoints import Checkpoints, fingerprint
from tailrl.training.results import give, run_record, write_run
from tailrl.training.rollouts import reward_metrics
from tailrl.training.token_table import TokenTable

PYTHON = "TAILRL_VERL_PYTHON"
"""The variable that names the Python of verl's environment."""

REWARD_FILE = Path(__file__).parents[1] / "integrations/verl/reward.py"

TEMPLATES = ("{{ messages[0]['content'] }}", "{{ bos_token }}{{ messages[0]['content'] }}")
"""Chat templates that leave a prompt as it is, for a policy without one of its own."""

TIMES = {"rollout": "gen", "weights": "update_weights", "backward": "update_actor", "forward": "old_log_prob"}
"""verl's times of a step's phases, `timing_s/`, by our names of them."""

VERLS = {
    keys.LOSS: "actor/pg_loss",
    keys.GRADIENT_NORM: "actor/grad_norm",
    keys.LEARNING_RATE: "actor/lr",
    keys.CLIPPED: "actor/pg_clipfrac",
    keys.STEP_SECONDS: "timing_s/step",
}
"""verl's names of metrics that only it has."""

ROW = {"token_ids", "mask", "sampler_logprobs", "trainer_logprobs", "advantage", "reward"}
"""What is read of a response in the plugin's log."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a run has before its first step."""

    run: Run
    seed: int
    policy_folder: Path
    tokenizer: PreTrainedTokenizerBase
    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    vocabulary_size: int
    ends: frozenset[int]  # tokens that end a response


def train(
    run: Run, seed: int, policy_folder: Path, problems_file: Path, out: Path, wandb_folder: Path, devices: int
) -> None:
    """Train one arm with one seed by verl; leaves what `tailrl.training.loop.train` leaves.

    Args:
        run: the arm's settings, with `backend: verl`.
        seed: of verl's data loader and of Python's own in its workers.
        policy_folder: the policy to start from, in Hugging Face format.
        problems_file: JSONL of problems.
        out: folder of the results.
        wandb_folder: folder of W&B's files.
        devices: accelerators of this machine that verl's trainer takes.

    Raises:
        StudyError: there is no such environment, a prompt reaches verl as other tokens, verl ended with an error, or
            what it left is not what was asked for.
    """
    started = time.perf_counter()
    tokenizer, problems = load_tokenizer(policy_folder), read_problems(problems_file)
    job = Job(
        run=run,
        seed=seed,
        policy_folder=policy_folder,
        tokenizer=tokenizer,
        problems=problems,
        prompts=[tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems],
        vocabulary_size=load_config(policy_folder).vocab_size,
        ends=frozenset(stop_tokens(policy_folder, tokenizer)),
    )
    identity = fingerprint(run, seed, policy_folder, problems_file, job.prompts)
    checkpoints = Checkpoints(out / "checkpoints", run.training.keep_checkpoints, identity)
    with checkpoints.held():
        if not checkpoints.finished.is_dir():
            folder = checkpoints.folder / f"verl-{checkpoints.name}"
            folder.mkdir(exist_ok=True)
            metrics, resumed = _train(job, interpreter(), folder, out, wandb_folder, devices)
            seconds = time.perf_counter() - started
            _write(job, folder, checkpoints, metrics, resumed, seconds)
        give(checkpoints.finished, out)
        checkpoints.clear()


def interpreter() -> str:
    """The Python of verl's environment; raises StudyError where there is none."""
    beside = Path(f"{sys.prefix}-verl/bin/python")
    python = os.environ.get(PYTHON) or (str(beside) if beside.is_file() else "")
    if not python or shutil.which(python) is None:
        raise ConfigurationError(
            f"training.backend: verl: set {PYTHON} to the Python of an environment with tailrl[verl] and vLLM "
            f"(tried {python or beside}); docs/how-to/verl-study.md has the commands"
        )
    return python


def _train(
    job: Job, python: str, folder: Path, out: Path, wandb_folder: Path, devices: int
) -> tuple[list[dict[str, float]], list[int]]:
    """Run verl's command to its end, and log each of its steps once it is there.

    Returns:
        The metrics of all steps, and the step from which verl went on, where an earlier process was interrupted.
    """
    run = job.run
    _write_inputs(job, folder)
    begun = _saved_step(folder)
    older: dict[int, Mapping[str, float]] = {}  # verl's metrics of earlier processes: of a repeated step the last
    for written in sorted(folder.glob("metrics-*.jsonl")):
        older |= _read_points(written)[0]
    # verl saves a step before it writes the step's metrics, which a kill may leave out; the plugin's log is there.
    earlier = [_metrics_of(job, folder, step, older.get(step, {})) for step in range(1, begun + 1)]
    file = folder / f"metrics-{len([*folder.glob('metrics-*.jsonl')]):03d}.jsonl"
    output = folder / "output.txt"
    say(f"arm {run.arm}, seed {job.seed}: verl trains from step {begun}; what it says is in {output}")
    recorded, end = list(earlier), 0
    with Tracker(run, job.seed, out, wandb_folder, earlier) as tracker:

        def look() -> None:
            nonlocal end
            points, end = _read_points(file, end)
            for step in sorted(points):
                recorded.append(_metrics_of(job, folder, step, points[step]))
                tracker.log(recorded[-1])

        command = [python, "-m", "verl.trainer.main_ppo", *_lines(job, folder, file, devices)]
        code = 0 if begun >= run.training.steps else run_beside(command, os.environ, output, look)
    if code < 0:
        # A process that was killed is started once more, and goes on from its last checkpoint.
        say(f"arm {run.arm}, seed {job.seed}: verl was ended by signal {-code}; all that it said is in {output}")
        sys.exit(128 - code)
    if code or len(recorded) != run.training.steps:
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ModelError(
            f"arm {run.arm}, seed {job.seed}: verl ended with {code} after {len(recorded)} of {run.training.steps} "
            f"steps ({' '.join(lines[-1:])[:300]}); all that it said is in {output}"
        )
    return recorded, [begun] if begun else []


def _saved_step(folder: Path) -> int:
    """The step of verl's last checkpoint, from which it goes on; 0 without one."""
    file = folder / "checkpoints/latest_checkpointed_iteration.txt"
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return int(text) if text.isdigit() else 0


def _read_points(file: Path, start: int = 0) -> tuple[dict[int, Mapping[str, float]], int]:
    """verl's metrics in a file by step, from a byte on; a validation alone is no step.

    Returns:
        The metrics of the lines that are whole, and the byte behind them, where the next look goes on. Nothing where
        there is no file yet.
    """
    if not file.is_file():
        return {}, start
    with file.open("rb") as opened:
        opened.seek(start)
        whole, _, _ = opened.read().rpartition(b"\n")
    points = [parse_object(line, file) for line in whole.decode().split("\n") if line]
    # A number that is not finite is null in verl's file.
    found: dict[int, Mapping[str, float]] = {
        point["step"]: {name: value for name, value in point["data"].items() if value is not None}
        for point in points
        if "actor/lr" in point["data"]
    }
    return found, start + len(whole) + bool(whole)


def _lines(job: Job, folder: Path, metrics_file: Path, devices: int) -> list[str]:
    """All lines of verl's command."""
    run, training = job.run, job.run.training
    longest = max(map(len, job.prompts))
    whole = longest + training.max_new_tokens
    batches = len(job.problems) // training.prompts  # verl leaves out an epoch's last, smaller one
    if not batches:
        raise ConfigurationError(
            f"training.prompts: {training.prompts} a step, and there are {len(job.problems)} problems"
        )
    responses = training.prompts * training.group_size // training.minibatches
    if responses % devices:
        raise ConfigurationError(
            f"training: an update has {responses} responses, which {devices} ranks cannot share equally"
        )
    epochs = math.ceil(training.steps / batches) + 1
    return [
        *train_lines(run, job.vocabulary_size, job.seed),
        f"+tailrl.log.folder={quoted((folder / 'tokens').resolve())}",
        f"+tailrl.log.responses={training.prompts * training.group_size}",
        f"data.train_files={quoted((folder / 'problems.parquet').resolve())}",
        f"data.val_files={quoted((folder / 'problems.parquet').resolve())}",
        f"data.max_prompt_length={longest}",
        f"actor_rollout_ref.model.path={quoted((folder / 'policy').resolve())}",
        f"reward.custom_reward_function.path={quoted(REWARD_FILE)}",
        f"{ROLLOUT}.max_model_len={whole}",
        f"{ROLLOUT}.max_num_batched_tokens={max(whole, 8192)}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={max(whole, training.token_budget)}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={max(whole, training.token_budget)}",
        f"trainer.n_gpus_per_node={devices}",
        f"trainer.total_epochs={epochs}",
        f"trainer.project_name={run.study}",
        f"trainer.experiment_name={run.arm}-seed{job.seed}",
        # verl's logger is in one of Ray's workers, which may lie on another machine and not see our own variables.
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={quoted(metrics_file.resolve())}",
        f"trainer.default_local_dir={quoted((folder / 'checkpoints').resolve())}",
        *training.verl_overrides,
    ]


def _write_inputs(job: Job, folder: Path) -> None:
    """The problems as verl's Parquet, and the policy with a chat template that gives each prompt as our loop does."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows = [
        {
            "prompt": [{"role": "user", "content": problem.prompt}],
            "data_source": job.run.task.name,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "problem": asdict(problem)},
        }
        for index, problem in enumerate(job.problems)
    ]
    with writing(folder):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "problems.parquet")
        shutil.rmtree(folder / "policy", ignore_errors=True)
        shutil.copytree(job.policy_folder, folder / "policy")
        tokenizer = with_template(job)
        tokenizer.save_pretrained(folder / "policy")


def with_template(job: Job) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template by which verl makes the same tokens of each prompt; StudyError without one."""
    tokenizer = load_tokenizer(job.policy_folder)
    for template in (tokenizer.chat_template,) if tokenizer.chat_template else TEMPLATES:
        tokenizer.chat_template = template
        prompts = [_by_verl(tokenizer, problem.prompt) for problem in job.problems]
        if prompts == job.prompts:
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            return tokenizer
    raise ModelError(
        f"{job.policy_folder}: its chat template gives verl other tokens than our own loop for a prompt such as "
        f"{job.problems[0].prompt[:60]!r}"
    )


def _by_verl(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tuple(encoded)


def _metrics_of(job: Job, folder: Path, step: int, of_verl: Mapping[str, float]) -> dict[str, float]:
    """Our metrics of one step, numbered from 1 as verl does, from the plugin's log and verl's own metrics."""
    run, rows = job.run, _read_rows(job, folder, step)
    lengths = [len(row["mask"]) for row in rows]
    rewards_PG = np.array([row["reward"] for row in rows], np.float32).reshape(-1, run.training.group_size)
    table = _table(job, rows)
    pruned = run.vocabulary.prunes
    rho = log_rho(run.vocabulary.rhos[0], job.vocabulary_size) if pruned else 0.0
    # verl sums a response's entropies as it sums its loss, and knows those of the whole vocabulary alone.
    entropy = math.nan if pruned else of_verl.get("actor/entropy", math.nan) / float(np.mean(lengths))
    unmasked = [key for key in keys.METRICS if key.startswith(f"{keys.CORR_UNMASKED}/")]
    return {
        **dict.fromkeys(keys.METRICS, math.nan),
        **table.metrics(run.correction),
        **{ours: of_verl.get(theirs, math.nan) for ours, theirs in VERLS.items()},
        **{keys.in_group(keys.TIME, ours): of_verl.get(f"timing_s/{theirs}", 0.0) for ours, theirs in TIMES.items()},
        **reward_metrics(rewards_PG),
        **(dict.fromkeys(unmasked, math.nan) if pruned else {}),
        keys.ENTROPY: entropy,
        keys.TOKENS_PER_SECOND: sum(lengths) / of_verl.get("timing_s/step", math.nan),
        keys.STEP: float(step - 1),
        keys.SKIPPED: float(not math.isfinite(of_verl.get("actor/grad_norm", math.nan))),
        keys.THRESHOLD: rho,
        keys.LENGTH: float(np.mean(lengths)),
        keys.LENGTH_MAX: float(max(lengths)),
        keys.STOPPED: float(np.mean([row["token_ids"][-1] in job.ends for row in rows])),
    }


def _read_rows(job: Job, folder: Path, step: int) -> list[dict[str, Any]]:
    """The responses of a step in the plugin's log, those of a prompt one after another; StudyError where some lack."""
    file = folder / f"tokens/{step}.jsonl"
    try:
        rows = [parse_object(line, file) for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"{file}: the plugin's log of a step cannot be read: {reason(error)}") from None
    by_prompt: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if missing := ROW - row.keys():
            raise DataError(f"{file}: a response has no {min(missing)}")
        if not row["mask"]:
            raise DataError(f"{file}: a response has no token")
        by_prompt.setdefault(tuple(row["token_ids"][: -len(row["mask"])]), []).append(row)
    size = job.run.training.group_size
    if len(rows) != job.run.training.prompts * size or any(len(group) % size for group in by_prompt.values()):
        raise DataError(f"{file}: holds {len(rows)} responses, which are not {job.run.training.prompts} times {size}")
    return [row for group in by_prompt.values() for row in group]


def _table(job: Job, rows: Sequence[Mapping[str, Any]]) -> TokenTable:
    """A step's tokens as our own trainer has them; NaN for what the log of a pruned policy does not hold."""
    run, pruned = job.run, job.run.vocabulary.prunes
    lengths_N = torch.tensor([len(row["mask"]) for row in rows])

    def column(name: str) -> Tensor:
        return torch.cat([torch.tensor(row[name], dtype=torch.float64) for row in rows])

    def or_whole(name: str, whole: float) -> Tensor:
        """A column of the trainer's safe set, which a policy that is not pruned has for all tokens."""
        if not pruned:
            return torch.full_like(trainer_T, whole)
        return column(name) if name in rows[0] else torch.full_like(trainer_T, math.nan)

    trainer_T, sampler_T = column("trainer_logprobs"), column("sampler_logprobs")
    outside_T = column("mask") == 0
    trainer_T = trainer_T.masked_fill(outside_T, 0.0)
    sequence_T = torch.repeat_interleave(torch.arange(len(rows)), lengths_N)
    # Of each prompt's rewards: verl takes away the advantages of rejected responses.
    rewards_PG = torch.tensor([row["reward"] for row in rows]).reshape(-1, run.training.group_size)
    advantage_N = advantages_of(run.estimator, rewards_PG).flatten().double()
    log_kept_T = or_whole("trainer_log_mass", 0.0)
    weights = correct(
        (trainer_T - sampler_T).float(),
        outside_T,
        sequence_T,
        len(rows),
        run.correction,
        logp_sampler_T=sampler_T.float(),
        advantage_T=advantage_N.float()[sequence_T],
    )
    unknown_T = torch.full_like(trainer_T, math.nan)
    return TokenTable(
        token_T=torch.cat([torch.tensor(row["token_ids"][-len(row["mask"]) :]) for row in rows]),
        sequence_T=sequence_T,
        logp_sampler_T=sampler_T,
        log_kept_sampler_T=unknown_T if pruned else torch.zeros_like(trainer_T),
        kept_vocab_sampler_T=unknown_T if pruned else torch.full_like(trainer_T, job.vocabulary_size),
        trainer=TokenLogprobs(
            logp_T=trainer_T,
            logp_full_T=(trainer_T + log_kept_T).masked_fill(outside_T, math.nan),
            log_kept_T=log_kept_T,
            kept_vocab_T=or_whole("trainer_set_size", float(job.vocabulary_size)),
            entropy_T=unknown_T,
            outside_T=outside_T,
        ),
        advantage_T=advantage_N[sequence_T],
        clipped_T=torch.zeros_like(outside_T),
        weights=weights,
        number_N=torch.arange(len(rows)),
        reward_N=torch.tensor([row["reward"] for row in rows], dtype=torch.float32),
        loss_M=torch.tensor([math.nan]),
    )


def _write(
    job: Job,
    folder: Path,
    checkpoints: Checkpoints,
    metrics: Sequence[Mapping[str, float]],
    resumed: list[int],
    seconds: float,
) -> None:
    """The results of a finished run, whole or not at all."""
    run = job.run
    left = folder / f"checkpoints/global_step_{run.training.steps}/actor/huggingface"
    if not left.is_dir():
        raise ModelError(f"{left}: verl left no policy there")
    model = load_policy(left)
    weights = whole_weights(model, getattr(torch, run.policy_dtype))
    steps = range(0, run.training.steps, run.training.keep_tokens_every)
    parts = [_table(job, _read_rows(job, folder, step + 1)).arrays(step) for step in steps]
    tokens = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    record = run_record(
        run,
        job.seed,
        ranks=1,
        startup_seconds=0.0,
        wall_seconds=round(seconds, 3),
        resumed_at_steps=resumed,
        fingerprint=checkpoints.fingerprint,
        sampler_self_test=None,
        stopped=None,
        first_prompt=first_prompt(job.tokenizer, job.prompts),
    )
    write_run(
        checkpoints.finished,
        run,
        record,
        metrics,
        tokens,
        lambda aside: save_policy(model, job.tokenizer, aside / "policy", weights),
        sum(weight.nbytes for weight in weights.values()),
    )
