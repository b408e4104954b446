"""The alarms of a run's own metrics: told once on the terminal, and again after a resume by none."""

import json
from pathlib import Path
from typing import Any

import pytest
from step_fixture import run_of

from tailrl.tracking.metrics import LEARNING_RATE, METRICS, REWARD, STEP
from tailrl.tracking.tracker import OF_STEP, Tracker

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def steps(count: int = 12, jump: int = 9) -> list[dict[str, float]]:
    """The learning rate is 100 times as large from one step on."""
    return [
        {**dict.fromkeys(METRICS, 0.5), STEP: float(n), REWARD: 0.4, LEARNING_RATE: 1e-3 if n >= jump else 1e-5}
        for n in range(count)
    ]


def told(arm: dict[str, Any], made: list[dict[str, float]], folder: Path, capsys: Capture) -> list[str]:
    """The lines with an alarm of a run with these steps."""
    with Tracker(run_of(arm), 3, folder, folder) as tracker:
        for metrics in made:
            tracker.log(metrics)
    return [line for line in capsys.readouterr().err.splitlines() if "alarm" in line]


def test_an_alarm_is_told_once(tmp_path: Path, capsys: Capture):
    [line] = told({}, [*steps(), *steps(9, 0), *steps()], tmp_path, capsys)
    assert "alarm learning_rate at step 9" in line


def test_a_run_without_a_clip_has_no_idle_one(tmp_path: Path, capsys: Capture):
    clip = {"clip": {"loss": "ppo", "ratio": "recompute"}}
    idle = [{**metrics, OF_STEP["clip"]: 0.0} for metrics in steps(14, 99)]
    assert told({}, idle, tmp_path, capsys) == []
    [line] = told(clip, idle, tmp_path, capsys)
    assert "alarm idle_clip" in line


def test_steps_of_before_a_resume_are_known_and_not_told(tmp_path: Path, capsys: Capture):
    for earlier in (0, 6, 10):
        made = steps()
        with Tracker(run_of({}), 3, tmp_path, tmp_path, made[:earlier]) as tracker:
            for metrics in made[earlier:]:
                tracker.log(metrics)
        told = [line for line in capsys.readouterr().err.splitlines() if "alarm" in line]
        assert len(told) == (earlier < 10)
        if told:
            assert "test seed 3: alarm learning_rate at step 9: the learning rate is 0.001, 100 times" in told[0]


def test_what_a_run_writes_does_not_depend_on_alarms(tmp_path: Path):
    with Tracker(run_of({}), 3, tmp_path, tmp_path) as tracker:
        for metrics in steps():
            tracker.log(metrics)
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == steps()
