"""Runs that announce their collapse, in memory and as the files that training leaves."""

import json
import math
from pathlib import Path

import numpy as np

from tailrl.report.early_warning import K3, METRICS, Case

STEPS, COLLAPSE = 60, 40


def case(
    seed: int, *, collapses: bool, rise: int | None = None, size: float = 10.0, entropy: float = 1.0, arm: str = "a"
) -> Case:
    """A run whose k3 rises to `size` times its level at a step, and whose other signals stay as they are."""
    signals = {key: np.ones(STEPS) for key, _ in METRICS.values()}
    signals["policy/entropy"] = np.full(STEPS, entropy)
    if rise is not None:
        signals[K3] = np.where(np.arange(STEPS) >= rise, size, 1.0)
    return Case("s", arm, seed, arm, seed % 2 == 0, STEPS, COLLAPSE if collapses else None, math.nan, True, signals)


def write_run(
    folder: Path, arm: str, seed: int, *, collapses: bool, mismatch: float = 1e-3, height: float = 0.8, ratio: str = "",
    stopped: str | None = None,
) -> None:  # fmt: skip
    """A run whose k3 starts at `mismatch` and whose reward at `height`; with a ratio, one of two updates a step."""
    job = folder / "train" / arm / f"seed{seed}"
    job.mkdir(parents=True)
    lines = []
    for step in range(STEPS):
        reward = height if step < 35 or not collapses else 0.0
        k3 = mismatch * (60 if collapses and step >= 20 else 1)
        skew = {"rollout_corr/c_positive_advantage": 0.1, "rollout_corr/c_negative_advantage": -0.05 * (step + 1)}
        lines.append(json.dumps({"train/step": step, "reward/mean": reward, K3: k3, "train/grad_norm": None, **skew}))
    (job / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings: dict[str, object] = {"training": {"steps": STEPS, "minibatches": 2 if ratio else 1}, "made": arm}
    settings |= {"clip": {"ratio": ratio}} if ratio else {}
    (job / "run.json").write_text(json.dumps({"settings": settings, "stopped": stopped}))


def write_runs(folder: Path) -> Path:
    """A study of two arms with eight seeds each: one whose runs all collapse, one whose runs do not."""
    for seed in range(200, 208):
        write_run(folder, "falls", seed, collapses=True)
        write_run(folder, "stays", seed, collapses=False)
    return folder
