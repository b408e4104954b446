"""Tracking: `metrics.jsonl` is the truth, Weights & Biases a mirror of it. The only module that imports wandb.

W&B runs offline unless WANDB_MODE says otherwise; WANDB_PROJECT and WANDB_ENTITY say where it files them. Runs
are grouped by study and arm, with a deterministic id, so that a seed that is trained again replaces itself.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tailrl.seeding import derive_seed
from tailrl.settings import Run

SHOWN = {"reward/mean": "reward", "rollout_corr/k3_kl": "k3", "train/grad_norm": "grad", "time/step": "s/step"}


class Tracker:
    """Takes one mapping of metrics a step: a line in a file, a point in W&B, a sign of life on the terminal."""

    def __init__(
        self, run: Run, seed: int, out: Path, wandb_folder: Path, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Args:
        run: the job's settings, stored in W&B as the run's configuration.
        seed: part of the run's name.
        out: folder that gets `metrics.jsonl`.
        wandb_folder: folder that gets `wandb/`, shared by the runs of a study.
        earlier: the steps of a run that was interrupted, which goes on: they stand in the file and in W&B again, but
            for those that a W&B server has.
        """
        self.file = (out / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)
        self.wandb = _start_wandb(run, seed, wandb_folder, bool(earlier))
        self.last_known = _last_step(self.wandb) if earlier else -1.0
        for metrics in earlier:
            self._write(metrics)
        self.name = f"{run.arm} seed {seed}"
        self.steps = run.training.steps
        self.progress = _progress() if sys.stderr.isatty() else None
        self.bar = None
        if self.progress:
            self.bar = self.progress.add_task(self.name, total=self.steps, completed=len(earlier), shown="")

    def __enter__(self) -> Self:
        if self.progress:
            self.progress.start()
        return self

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write one step; a value that is not finite becomes null (JSON has no nan)."""
        self._write(metrics)
        shown = "  ".join(f"{label} {metrics[key]:.3g}" for key, label in SHOWN.items())
        if self.progress and self.bar is not None:
            self.progress.update(self.bar, advance=1, shown=shown)
        else:
            print(
                f"{self.name}  step {metrics['train/step'] + 1:.0f}/{self.steps}  {shown}", file=sys.stderr, flush=True
            )

    def _write(self, metrics: Mapping[str, float]) -> None:
        self.file.write(json_line(metrics))
        if metrics["train/step"] > self.last_known:
            self.wandb.log(dict(metrics))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress:
            self.progress.stop()
        self.file.close()
        self.wandb.finish(exit_code=0 if kind is None else 1)


def json_line(metrics: Mapping[str, float]) -> str:
    """A step as `metrics.jsonl` has it."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}) + "\n"


def wandb_id(run: Run, seed: int) -> str:
    """The run's id: the same whenever the same arm and seed are trained, and no other arm's."""
    plain = f"{run.study}-{run.arm}-seed{seed}"
    # W&B takes few characters in an id; what is replaced is told apart by a digest.
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in plain)
    return safe if safe == plain else f"{safe}-{derive_seed(plain):08x}"


def _last_step(wandb_run: Any) -> float:
    """The last step that a resumed run has on its server; -1 where W&B knows nothing, as offline."""
    return float(wandb_run.summary.get("train/step", -1)) if wandb_run.resumed else -1.0


def _start_wandb(run: Run, seed: int, folder: Path, resumed: bool) -> Any:
    import wandb

    os.environ.setdefault("WANDB_MODE", "offline")
    identity = wandb_id(run, seed)
    for earlier in (folder / "wandb").glob(f"offline-run-????????_??????-{identity}"):
        shutil.rmtree(earlier, ignore_errors=True)
    started = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "tailrl"),
        dir=folder,
        id=identity,
        # A run that starts anew replaces the one on the server; one that goes on continues it.
        resume="allow" if resumed else None,
        name=f"{run.arm}-seed{seed}",
        group=f"{run.study}/{run.arm}",
        job_type="train",
        tags=[run.arm, run.estimator, f"vocabulary-{run.vocabulary.rule}", f"correction-{run.correction.sequence}"],
        config={**run.model_dump(), "seed": seed},
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
    )
    started.define_metric("train/step")
    started.define_metric("*", step_metric="train/step")
    return started


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[shown]}"), console=Console(stderr=True))
