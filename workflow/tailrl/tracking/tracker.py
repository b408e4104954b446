"""Writes `metrics.jsonl`, the record of a run; a separate process mirrors it to Weights & Biases (`wandb_mirror`)."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrl.artifacts.metrics import metrics_line
from tailrl.config.jobs import Run
from tailrl.runtime.errors import StorageError, reason, say, writing
from tailrl.tracking.metrics import (
    CLIPPED,
    CORR_UNMASKED,
    CORR_VERL,
    GRADIENT_NORM,
    K3_MASKED,
    K3_UNMASKED,
    LEARNING_RATE,
    REWARD,
    STEP,
    STEP_SECONDS,
    in_group,
)
from tailrl.tracking.wandb_mirror import FINISH_SECONDS
from tailrl.watch.alarms import Alarm, Alarms, Step

SHOWN = {REWARD: "reward", K3_MASKED: "k3", GRADIENT_NORM: "grad", STEP_SECONDS: "s/step"}
OF_STEP = {
    "mean_abs": in_group(CORR_UNMASKED, "delta_abs_mean"),
    "k3": K3_UNMASKED,
    "ess": in_group(CORR_VERL, "rollout_is_eff_sample_size"),
    "learning_rate": LEARNING_RATE,
    "reward": REWARD,
    "clip": CLIPPED,
}  # the metric that is each number of a step, for the alarms of `tailrl watch`
RECENT = 20  # steps whose mean time is expected of the rest: with the responses they grow longer in training


class Tracker:
    """Takes one mapping of metrics a step: a line in a file, a point in W&B, a line and alarms on the terminal."""

    def __init__(
        self, run: Run, seed: int, out: Path, wandb_folder: Path, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Args:
        run: the job's settings, stored in W&B as the run's configuration.
        seed: part of the run's name.
        out: folder that gets `metrics.jsonl`.
        wandb_folder: folder that gets `wandb/`, shared by the runs of a study.
        earlier: the steps of an interrupted run that is resumed: they are written again.
        """
        metrics = out / "metrics.jsonl"
        with writing(metrics):
            # A finished run may still have the old file under a second name.
            metrics.unlink(missing_ok=True)
            self.file = metrics.open("w", encoding="utf-8", buffering=1)
            for step in earlier:
                self.file.write(metrics_line(step))
        settings = run.model_dump(mode="json")
        record = {"study": run.study, "arm": run.arm, "seed": seed, "settings": settings}
        self.run = run
        self.alarms = Alarms(exact=run.sampler.TRAINERS_BITS)
        self.told: set[str] = set()
        for step in earlier:
            self._new_alarms(step)
        self.mirror = Mirror({"record": record, "metrics": str(metrics), "folder": str(wandb_folder)})
        self.name = f"{run.arm} seed {seed}"
        self.recent: deque[float] = deque(maxlen=RECENT)

    def __enter__(self) -> Self:
        return self

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write one step; a value that is not finite becomes null (JSON has no NaN). StudyError: the disk refuses."""
        line = metrics_line(metrics)
        try:
            self.file.write(line)
        except OSError as error:
            raise StorageError(
                f"{self.file.name}: a step's metrics, {len(line)} bytes, could not be written: {reason(error)}"
            ) from None
        shown = "  ".join(f"{label} {metrics[key]:.3g}" for key, label in SHOWN.items())
        self.recent.append(metrics[STEP_SECONDS])
        done = metrics[STEP] + 1
        steps = self.run.training.steps
        left = (steps - done) * sum(self.recent) / len(self.recent) / 60
        print(f"{self.name}  step {done:.0f}/{steps}  {shown}  left {left:.1f} min", file=sys.stderr, flush=True)
        for alarm in self._new_alarms(metrics):
            say(f"{self.name}: alarm {alarm.name} at step {alarm.step:.0f}: {alarm.says}. {alarm.do}")

    def _new_alarms(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms of the next step; each is told once a run."""
        names = [name for name in OF_STEP if name != "clip" or self.run.clip is not None]
        numbers = {name: metrics.get(OF_STEP[name], math.nan) for name in names}
        lag = float(self.run.disturbance.staleness)
        raised = self.alarms.step(Step(number=metrics[STEP], lag=lag, **numbers))  # type: ignore[arg-type]
        new = [alarm for alarm in raised if alarm.name not in self.told]
        self.told |= {alarm.name for alarm in new}
        return new

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.file.close()
        except OSError:
            # A full disk refuses the buffered rest too; the exception that is being raised has said so.
            if kind is None:
                raise
        self.mirror.close(0 if kind is None else 1)


class Mirror:
    """The process that mirrors a run; its failure costs the training job a warning, and nothing else."""

    def __init__(self, given: Mapping[str, object]) -> None:
        """Start it, unless WANDB_MODE is disabled; `given` is its first line of input."""
        self.folder = given["folder"]
        self.process: subprocess.Popen[str] | None = None
        if os.environ.get("WANDB_MODE") == "disabled":
            return
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tailrl.tracking.wandb_mirror"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # so that its whole group can be killed
            )
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(given) + "\n")  # fits a pipe's buffer
            self.process.stdin.flush()
        except OSError as error:
            self._warn(reason(error))

    def close(self, exit_code: int) -> None:
        """Wait for its end; kill it after `FINISH_SECONDS`."""
        if self.process is None:
            return
        try:
            self.process.communicate(f"{exit_code}\n", timeout=FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self._warn(f"it was not done {FINISH_SECONDS} s after the last step")
        else:
            if self.process.returncode:
                self._warn(f"its process ended with {self.process.returncode}")

    def _warn(self, why: str) -> None:
        say(
            f"warning: W&B lacks something of this run ({why}); metrics.jsonl has all of it, and "
            f"`wandb sync {self.folder}/wandb/*run-*` sends what W&B has written"
        )
