"""How far a study has come, and an estimate of the time left, from the files that its jobs write."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tailrl.artifacts.manifest import MANIFEST
from tailrl.artifacts.metrics import follow_metrics
from tailrl.config.study import BASE_ARM, Study
from tailrl.page_parts.number_text import count
from tailrl.tracking.metrics import STEP_SECONDS

QUIET_SECONDS = 600.0  # a run that has written no step for so long is taken as stopped


@dataclass(frozen=True, slots=True)
class RunProgress:
    """One training run: its steps, those that are recorded, their seconds, and whether it is finished or under way."""

    arm: str
    steps: int
    done: int
    seconds: float
    finished: bool
    under_way: bool


def runs_of(study: Study, folder: Path, now: float) -> Iterator[RunProgress]:
    """Every training run of the study's arms; those of ablations are left out, as `snakemake` leaves them out.

    Args:
        study: a study, or one part of a study in parts.
        folder: the study's own folder, results/<study>.
        now: seconds since 1970, against which the files' times are held.

    Raises:
        StudyError: a line of metrics is not JSON.
    """
    for arm in study.arms:
        steps = study.run(arm).training.steps
        for seed in study.arm_seeds()[arm]:
            out = folder / "train" / arm / f"seed{seed}"
            seconds = list(_step_seconds(out / "metrics.jsonl"))
            finished = (out / MANIFEST).is_file()
            recent = bool(seconds) and now - (out / "metrics.jsonl").stat().st_mtime < QUIET_SECONDS
            done = steps if finished else min(len(seconds), steps)
            yield RunProgress(arm, steps, done, sum(seconds) / max(len(seconds), 1), finished, recent and not finished)


def seconds_left(runs: list[RunProgress]) -> float | None:
    """Seconds of training that are left, as if as many runs as now go on side by side; None before the first step."""
    known: dict[str, list[float]] = {}
    for run in runs:
        if run.seconds:
            known.setdefault(run.arm, []).append(run.seconds)
    if not known:
        return None
    mean = {arm: sum(each) / len(each) for arm, each in known.items()}
    usual = sum(mean.values()) / len(mean)
    work = sum((run.steps - run.done) * mean.get(run.arm, usual) for run in runs)
    return work / max(1, sum(run.under_way for run in runs))


def progress_page(study: Study, folder: Path, now: float) -> str:
    """What is done of a study and how long its training may take still, in sentences."""
    runs = list(runs_of(study, folder, now))
    steps, done = sum(run.steps for run in runs), sum(run.done for run in runs)
    finished, under_way = sum(run.finished for run in runs), sum(run.under_way for run in runs)
    share = done / steps if steps else 1.0
    lines = [
        f"{study.name}: {finished} of {count(len(runs), 'run')} trained, {under_way} under way; "
        f"{done:,} of {count(steps, 'step')}, {100 * share:.0f} %"
    ]
    left = seconds_left(runs)
    if done == steps:
        evaluated = sum((folder / "eval" / f"{arm}.json").is_file() for arm in (BASE_ARM, *study.arms))
        page = "is there" if (folder / "summary.html").is_file() else "is not there yet"
        lines.append(f"training is done; {evaluated} of {len(study.arms) + 1} evaluations, and the page {page}")
    elif left is None:
        lines.append("no step is recorded yet, so there is no estimate of the time left")
    else:
        beside = f"{under_way} at a time" if under_way else "one at a time, for none is under way now"
        lines.append(f"training may take {_duration(left)} more (an estimate: the recorded steps' time, {beside})")
        lines.append("the start of each run, the evaluations and the page come on top")
    return "".join(f"{line}\n" for line in lines)


def _step_seconds(metrics: Path) -> Iterator[float]:
    """The seconds of each whole line; a last line that is being written is left out."""
    if metrics.is_file():
        yield from (step.get(STEP_SECONDS) or 0.0 for step in follow_metrics(metrics, lambda: True))


def _duration(seconds: float) -> str:
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
