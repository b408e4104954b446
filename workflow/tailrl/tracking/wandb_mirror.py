"""Weights & Biases, as a mirror of the files that training writes.

    python -m tailrl.tracking.wandb_mirror   started by `tracker` beside a training job: follows metrics.jsonl
    tailrl mirror results/NAME               afterwards: sends what the server lacks of the finished runs

A server may be out of reach, be slow or refuse the key. So W&B never shares a process with training. Training waits
for this process only at its end, and no longer than `FINISH_SECONDS`.

Offline unless WANDB_MODE says otherwise; WANDB_PROJECT and WANDB_ENTITY say where runs are filed. Runs are grouped by
study and arm. A run's id ends with a digest of its first step, whose seconds no two runs share. So a run that is
mirrored again continues after the last step that the server has, and a seed that is trained again is another run.
"""

import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from tailrl.artifacts.metrics import follow_metrics, read_steps
from tailrl.artifacts.records import RunRecord, finished_jobs, read_record
from tailrl.config.jobs import Run
from tailrl.runtime.errors import StudyError, reason, say
from tailrl.runtime.seeding import derive_seed
from tailrl.tracking.alarm import RunAlarms
from tailrl.tracking.metrics import STEP

FINISH_SECONDS = 60
"""How long a mirror may run after the last step of a training job."""

OF_ANOTHER_RUN = ("SWEEP_ID", "SWEEP_PARAM_PATH", "LAUNCH", "LAUNCH_CONFIG_PATH", "RUN_ID", "RESUME")
"""Variables WANDB_... by which a sweep, or a run that was launched, would replace the name of ours."""

UPLOAD_SECONDS = 600.0
"""How long `tailrl mirror` waits for the upload of one run."""

Mode = Literal["offline", "online"]
POLL_SECONDS = 0.5


def run_name(record: Mapping[str, Any]) -> str:
    """A unique name of study, arm and seed, in the few characters that W&B accepts."""
    plain = f"{record['study']}-{record['arm']}-seed{record['seed']}"
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in plain)
    return safe if safe == plain else f"{safe}-{derive_seed(plain):08x}"


def run_id(record: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The run's id: its name, and a digest of the first step."""
    return f"{run_name(record)}-{derive_seed(json.dumps(first, sort_keys=True)):08x}"


def alarms_of(run: Run, steps: Iterable[Mapping[str, float | None]] = ()) -> RunAlarms:
    """The alarms of a run with these settings; `steps`: those that it has recorded already."""
    staleness, exact = float(run.disturbance.staleness), run.sampler.TRAINERS_BITS
    return RunAlarms(clips=run.clip is not None, lag=staleness, exact=exact, steps=steps)


def _start(record: Mapping[str, Any], first: Mapping[str, Any], folder: Path, mode: Mode) -> Any:
    for name in OF_ANOTHER_RUN:
        os.environ.pop(f"WANDB_{name}", None)
    import wandb

    folder.mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
    settings = record["settings"]
    made = Run.model_validate(settings)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "tailrl"),
        mode=mode,
        dir=folder,
        id=run_id(record, first),
        resume="allow" if mode == "online" else None,
        name=f"{record['arm']}-seed{record['seed']}",
        group=f"{record['study']}/{record['arm']}",
        job_type="train",
        tags=[made.arm, made.estimator, f"vocabulary-{made.vocabulary.rule}", f"correction-{made.correction.sequence}"],
        config={**settings, "seed": record["seed"]},
        settings=wandb.Settings(
            silent=True,
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            finish_timeout=UPLOAD_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def mirror_run(
    record: Mapping[str, Any],
    points: Iterator[Mapping[str, float | None]],
    folder: Path,
    mode: Mode,
    exit_code: Callable[[], int] = lambda: 0,
    summary: Mapping[str, float] | None = None,
) -> int:
    """Makes one run in W&B, or continues it; returns how many steps were sent.

    Args:
        record: study, arm, seed and settings, as run.json has them.
        points: the run's steps, from the first one on; null is a value that is not finite.
        folder: gets `wandb/`.
        mode: where W&B writes it.
        exit_code: called after the last step; returns 0 if training ended well.
        summary: values of the run as a whole.
    """
    first = next(points, None)
    if first is None:
        return 0
    if mode == "offline":
        # An offline run cannot be continued: it is written anew, with all steps.
        for earlier in (folder / "wandb").glob(f"offline-run-????????_??????-{run_name(record)}-????????"):
            shutil.rmtree(earlier, ignore_errors=True)
    run = _start(record, first, folder, mode)
    known, sent = run.starting_step, 0
    alarms = alarms_of(Run.model_validate(record["settings"]))
    for number, point in enumerate(chain([first], points)):
        raised = alarms.see(point)
        if number >= known:
            for alarm in raised:
                run.alert(title=f"{alarm.name} at step {number}", text=f"{alarm.says}. {alarm.do}", level="WARN")
                run.summary[f"alarms/{alarm.name}"] = number
            run.log({key: math.nan if value is None else value for key, value in point.items()}, step=number)
            sent += 1
    run.summary.update(summary or {})
    run.finish(exit_code=exit_code())
    return sent


def mirror(results: Path, summary: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda _: {}) -> None:
    """Sends a server the steps that it lacks of a study's finished runs, and prints how many.

    No step is sent twice. WANDB_MODE=offline writes files for a W&B server into `results/wandb`.

    Args:
        results: the study's folder.
        summary: gives a run's values as a whole from its record.

    Raises:
        StudyError: there is no finished run, its files cannot be read, or W&B does not take it.
    """
    jobs = finished_jobs(results)
    mode: Mode = "offline" if os.environ.get("WANDB_MODE") == "offline" else "online"
    for job in jobs:
        record, points = read_record(job, RunRecord).model_dump(), read_steps(job)
        whole = summary(record)
        try:
            # The files that W&B writes beside an online run repeat ours: they go.
            with tempfile.TemporaryDirectory() as scratch:
                folder = results if mode == "offline" else Path(scratch)
                sent = mirror_run(record, iter(points), folder, mode, summary=whole)
        except Exception as error:  # of wandb's own, of its HTTP library, of the system
            raise StudyError(f"{job}: W&B does not take it: {reason(error)}; it can be tried again") from None
        print(f"{run_id(record, points[0])}: {sent} of {len(points)} steps sent")


class _Caller:
    """The training job's second line on standard input: its exit code, or nothing if the job was killed."""

    def __init__(self) -> None:
        self.code: int | None = None

    def ended(self) -> bool:
        """Whether the job has ended; waits up to POLL_SECONDS for it."""
        if self.code is None and select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            self.code = int(sys.stdin.readline().strip() or 1)
            # A killed job cannot end this process.
            signal.alarm(FINISH_SECONDS + 1)
        return self.code is not None


def main() -> None:
    """Mirrors the run that the first line on standard input names, until the second line."""
    given = json.loads(sys.stdin.readline())
    caller = _Caller()
    mode: Mode = "online" if os.environ.get("WANDB_MODE") == "online" else "offline"
    points = follow_metrics(Path(given["metrics"]), caller.ended)
    try:
        mirror_run(given["record"], points, Path(given["folder"]), mode, lambda: caller.code or 0)
    except Exception as error:
        say(f"W&B: {reason(error)}")
        os._exit(1)  # at an ordinary exit wandb would wait for its server


if __name__ == "__main__":
    main()
