"""What ran, in words: commits, libraries, machines, seconds, interruptions, assumed values; from jobs' run.json."""

from collections.abc import Iterable, Sequence

import numpy as np

from tailrl.artifacts.records import JobRecord
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.runtime.errors import few
from tailrl.tracking.metrics import SKIPPED, TIME, in_group

WORK = ("rollout", "forward", "backward", "optimizer")
"""The phases of a step: generation, scoring, gradients and update."""


def made_by(records: Sequence[JobRecord], other_versions: str = "") -> list[str]:
    """Commit, versions and hardware of jobs, a sentence each without its end."""
    return [f"{what.capitalize()}: {words}" for what, words in made_by_row(records, other_versions).items()]


def made_by_row(records: Sequence[JobRecord], other_versions: str = "") -> dict[str, str]:
    """Commit, versions and hardware of jobs, as a row of a table."""
    versions = [", ".join(f"{k} {v}" for k, v in sorted(r.versions.items())) for r in records]
    commits = [f"{r.commit or 'unknown'}{' with uncommitted changes' if r.dirty else ''}" for r in records]
    return {
        "commit": distinct(commits),
        "versions": f"{distinct(versions)}{other_versions}",
        "hardware": distinct(_hardware(record) for record in records),
    }


def distinct(values: Iterable[object]) -> str:
    """The values as text, each once."""
    return "; also ".join(dict.fromkeys(str(value) for value in values))


def _hardware(record: JobRecord) -> str:
    machine = record.hardware
    cpu, gpu = machine.cpu or "CPU not recorded", f"GPU {machine.gpu}" if machine.gpu else "no GPU"
    return f"{cpu}, {machine.cores or '?'} cores, {machine.memory_gb:.0f} GB, {gpu}, {record.threads} thread(s) a job"


def work_share(run: TrainedRun) -> float:
    """The share of `WORK` in a job's wall time past start-up; NaN if not timed."""
    past = run.record.wall_seconds - run.record.startup_seconds
    spent = np.sum([np.nansum(run.metric(in_group(TIME, phase))) for phase in WORK])
    return float(spent / past) if past > 0 and spent > 0 else float("nan")


OTHER_PROMPTS = (
    "The runs had different prompt tokens, made from the same problems: the chat template may hold the date, or the "
    "tokenizer changed"
)


def what_ran(results: Results) -> str:
    """Versions, commit, hardware, seconds and assumed values, as a Markdown list."""
    runs = results.all_runs()
    records = [run.record for run in runs]
    wall = [r.wall_seconds for r in records]
    shares = [share for share in map(work_share, runs) if not np.isnan(share)]
    timed = f"{min(wall):.0f} to {max(wall):.0f} s each, {sum(wall) / 3600:.2f} h in all"
    busy = f"at least {100 * min(shares):.0f} % of a job" if shares else "not recorded"
    left_out = sum(int((~np.isfinite(r.tokens.logp_trainer_T - r.tokens.logp_sampler_T)).sum()) for r in runs)
    seeds = ", ".join(dict.fromkeys(str(run.seed) for run in runs))
    items = [
        f"Training jobs of the arms above, without those of ablations: {len(runs)}, seeds {seeds}",
        *made_by(records, _lm_eval(results)),
        f"Wall time of the jobs: {timed}",
        f"Generation, forward, backward and optimizer: {busy}'s wall time past start-up (jobs timed: {len(shares)})",
        *([f"Made by another version of {few(results.edited)} than is there now"] if results.edited else []),
        *(
            [OTHER_PROMPTS]
            if len({r.fingerprint["prompts"] for r in records if "prompts" in r.fingerprint}) > 1
            else []
        ),
        *_interruptions(runs),
        *_assumed_values(results),
    ]
    if left_out:
        items.append(f"Sampled tokens left out of the figure of Δ, log-probability not finite: {left_out}")
    return "\n".join(f"- {item}." for item in items)


def made_by_rows(results: Results) -> list[dict[str, str]]:
    """The one row of made_by.csv: the commit, the versions and the hardware of the training jobs."""
    return [made_by_row([run.record for run in results.all_runs()], _lm_eval(results))]


def _lm_eval(results: Results) -> str:
    return f"; lm-eval {distinct(evaluation.lm_eval for evaluation in results.all_evaluations())}"


def _interruptions(runs: Sequence[TrainedRun]) -> list[str]:
    """Skipped updates, restarts from a checkpoint, and runs that a rule ended."""
    skipped, resumed, stopped = [], [], []
    for run in runs:
        name, skipped_N = f"{run.arm}, seed {run.seed}", run.metric(SKIPPED)
        if np.nansum(skipped_N):
            skipped.append(f"{name}: {np.nansum(skipped_N):.0f} of {skipped_N.size}")
        if steps := run.record.resumed_at_steps:
            resumed.append(f"{name}: from step {', '.join(map(str, steps))}")
        if why := run.record.stopped:
            stopped.append(f"{name}: {why}")
    recorded = any(SKIPPED in run.metrics for run in runs)
    items = [f"Updates skipped for a NaN or Inf: {'; '.join(skipped) or 'none'}"] if recorded else []
    items += [f"Went on from a checkpoint after an interruption: {'; '.join(resumed)}"] if resumed else []
    # A survival curve counts such a run as censored at its end, although its end is not random.
    return items + ([f"Ended early by a rule: {'; '.join(stopped)}"] if stopped else [])


def _assumed_values(results: Results) -> list[str]:
    """The thresholds of weights, where an arm has such a weight."""
    corrections = {arm: results.settings(arm).correction for arm in results.arms}
    used = [f"{one.limit} in {arm}" for arm, one in corrections.items() if one.sequence_bounded]
    key = "`correction.sequence_threshold`"
    return [f"{key} is assumed, since the paper's value is unconfirmed: {', '.join(used)}"] if used else []
