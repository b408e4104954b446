"""Whole runs with the exact engine, and all of them that must be the same however often they were interrupted."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_fixture import run_of

from tailrl.records import Problem, Rollout, write_problems
from tailrl.settings import Run
from tailrl.training import loop

TIMED = ("time/", "throughput/")
SIZES = {"steps": 7, "checkpoint_every": 2, "learning_rate": 1e-2, "warmup_steps": 3, "token_budget": 90}


@dataclass(frozen=True)
class Result:
    """Metrics without times, the policy's file, the tokens' arrays as bytes, and run.json."""

    lines: list[dict[str, float | None]]
    policy: bytes
    tokens: dict[str, bytes]
    record: dict[str, Any]

    def same(self, other: "Result") -> bool:
        """To the bit, in all that no clock has a part in."""
        return (self.lines, self.policy, self.tokens) == (other.lines, other.policy, other.tokens)


@dataclass(frozen=True)
class Runs:
    """Trains in a folder on a policy."""

    folder: Path
    policy: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "out" / "checkpoints"

    def saved(self) -> list[str]:
        """The names of the checkpoints, the oldest first."""
        return sorted(file.name for file in self.checkpoints.glob("step-*"))

    def settings(self, arm: dict[str, Any] | None = None, **training: Any) -> Run:
        exact = {"sampler": {"engine": "exact", "dtype": "float32"}}
        return run_of({**exact, **(arm or {})}, **{**SIZES, **training})

    def train(self, run: Run, seed: int = 5, name: str = "out") -> Result:
        self.train_rank(run, seed, name)
        return self.result(name)

    def train_rank(self, run: Run, seed: int, name: str) -> None:
        """What one rank does, be it the only one."""
        loop.train(run, seed, self.policy, self.folder / "problems.jsonl", self.folder / name, self.folder)

    def result(self, name: str) -> Result:
        """What a run has left."""
        out = self.folder / name
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        with np.load(out / "tokens.npz") as arrays:
            tokens = {key: arrays[key].tobytes() for key in arrays.files}
        return Result(
            [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines],
            (out / "policy" / "model.safetensors").read_bytes(),
            tokens,
            json.loads((out / "run.json").read_text(encoding="utf-8")),
        )


class Interrupted(BaseException):
    """What no code catches: the nearest that a test in one process comes to SIGKILL."""


def make_runs(folder: Path, policy: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Random policies solve nothing: right is what a checksum of the response says."""

    def rewards(rollouts: Sequence[Rollout], *_: object) -> np.ndarray:
        return np.array([zlib.crc32(str(r.tokens).encode()) % 2 for r in rollouts], dtype=np.float32)

    write_problems(problems, folder / "problems.jsonl")
    monkeypatch.setattr(loop, "rewards", rewards)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return Runs(folder, policy)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Each process is interrupted in the next one of these steps, and the last one is not."""
    waiting, take_step = list(steps), loop.take_step

    def interrupted(job: Any, state: Any, *others: Any) -> Any:
        if waiting and state.step == waiting[0]:
            waiting.pop(0)
            raise Interrupted
        return take_step(job, state, *others)

    monkeypatch.setattr(loop, "take_step", interrupted)
