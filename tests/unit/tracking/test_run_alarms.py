"""The alarms of a run's own metrics: told once, on the terminal and in W&B, and again after a resume by none."""

import json
from pathlib import Path

import pytest
from step_fixture import run_of
from wandb_fixture import FAKE

from tailrl.tracking.alarm import OF_STEP
from tailrl.tracking.metrics import LEARNING_RATE, METRICS, REWARD, STEP
from tailrl.tracking.tracker import Tracker
from tailrl.tracking.wandb_mirror import alarms_of


def steps(count: int = 12, jump: int = 9) -> list[dict[str, float]]:
    """The learning rate is 100 times as large from one step on."""
    return [
        {**dict.fromkeys(METRICS, 0.5), STEP: float(n), REWARD: 0.4, LEARNING_RATE: 1e-3 if n >= jump else 1e-5}
        for n in range(count)
    ]


def test_an_alarm_is_told_once():
    alarms = alarms_of(run_of({}))
    told = [[alarm.name for alarm in alarms.see(metrics)] for metrics in [*steps(), *steps(9, 0), *steps()]]
    assert told[9] == ["learning_rate"]
    assert [names for names in told if names] == [["learning_rate"]]


def test_a_run_without_a_clip_has_no_idle_one():
    clip = {"clip": {"loss": "ppo", "ratio": "recompute"}}
    idle = [{**metrics, OF_STEP["clip"]: 0.0} for metrics in steps(14, 99)]
    for arm, names in (({}, []), (clip, ["idle_clip"])):
        alarms = alarms_of(run_of(arm))
        assert [alarm.name for metrics in idle for alarm in alarms.see(metrics)] == names


def test_steps_of_before_a_resume_are_known_and_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_wandb_gets_an_alert_and_the_run_s_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wandb.py").write_text(FAKE, encoding="utf-8")
    (tmp_path / "server").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    monkeypatch.setenv("FAKE_WANDB_SERVER", str(tmp_path / "server"))
    monkeypatch.setenv("WANDB_MODE", "online")
    with Tracker(run_of({}), 3, tmp_path, tmp_path) as tracker:
        for metrics in steps():
            tracker.log(metrics)
    [file] = (tmp_path / "server").glob("*.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    [(title, text, level)] = record["alerts"]
    assert (title, level, record["summary"]) == ("learning_rate at step 9", "WARN", {"alarms/learning_rate": 9})
    assert text.startswith("the learning rate is 0.001, 100 times that of the step before. Check the schedule")
    assert len(record["steps"]) == 12
