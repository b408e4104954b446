"""Tracking: the file is the truth; W&B, in a process of its own, may do what it likes."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases_fixture import rest_long
from wandb_fixture import FAKE

from tailrl.config.jobs import Run
from tailrl.config.load import parse_study
from tailrl.tracking import tracker, wandb_mirror
from tailrl.tracking.metrics import METRICS
from tailrl.tracking.tracker import SHOWN, Tracker

STUDY = parse_study(
    {
        "name": "my_study",
        "training": {"steps": 2},
        "arms": {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-13"}}},
    }
)
RUN = STUDY.run("dvp")


def point(step: int, **changes: float) -> dict[str, float]:
    return dict.fromkeys(METRICS, 1.0) | {"train/step": float(step)} | changes


def at_a_glance(step: dict[str, float]) -> dict[str, float]:
    """A step as W&B has it: with copies of the two metrics to look at first."""
    copies = {"At a glance/reward": step["reward/mean"], "At a glance/k3": step["rollout_corr_unmasked/k3_kl"]}
    return step | copies


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No W&B but what the test asks for."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake W&B, which a tracker's mirror finds in place of the real one."""
    folder = tmp_path / "server"
    folder.mkdir()
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}{os.pathsep}{os.pathsep.join(filter(None, sys.path))}")
    monkeypatch.setenv("FAKE_WANDB_SERVER", str(folder))
    monkeypatch.setenv("WANDB_MODE", "online")
    return folder


def track(run: Run, folder: Path, seed: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    with Tracker(run, seed, folder, folder) as tracker:
        tracker.log(point(0))
        tracker.log(point(1))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def on_server(server: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(server.glob("*.json"))}


# --- the file ------------------------------------------------------------------------------------------


def test_every_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(RUN, 3, tmp_path, tmp_path) as tracker:
        tracker.log(point(0, **{"reward/mean": 0.5, "rollout_corr/chi2_seq": math.inf}))
        # A run that is killed has written every step that it finished.
        assert len(lines(tmp_path)) == 1
        tracker.log(point(1, **{"train/loss": math.nan, "policy/entropy": 0.1 + 0.2}))
    assert lines(tmp_path) == [
        point(0) | {"reward/mean": 0.5, "rollout_corr/chi2_seq": None},
        point(1) | {"train/loss": None, "policy/entropy": 0.1 + 0.2},
    ]
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("dvp seed 3  step 1/2  reward 0.5") and len(shown) == 2


def test_a_step_says_how_long_the_others_will_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After 20 steps of 6 s, 60 steps are left. After two of 66 s, 58 are: the last 20 took 12 s on average."""
    run = RUN.model_copy(update={"training": RUN.training.model_copy(update={"steps": 80})})
    with Tracker(run, 0, tmp_path, tmp_path) as tracker:
        for step in range(80):
            tracker.log(point(step, **{"time/step": 66.0 if step in (20, 21) else 6.0}))
    shown = capsys.readouterr().err.splitlines()
    assert [shown[step].rsplit("  ", 1)[1] for step in (0, 19, 21, 79)] == [
        "left 7.9 min",
        "left 6.0 min",
        "left 11.6 min",
        "left 0.0 min",
    ]


def test_what_is_shown_is_measured() -> None:
    assert SHOWN.keys() <= METRICS.keys()


def test_an_error_leaves_what_was_logged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Tracker(RUN, 0, tmp_path, tmp_path) as tracker:
        tracker.log(point(0))
        raise ZeroDivisionError
    assert len(lines(tmp_path)) == 1
    assert tracker.file.closed


def test_a_run_that_starts_again_starts_its_file_again(tmp_path: Path) -> None:
    track(RUN, tmp_path)
    track(RUN, tmp_path)
    assert len(lines(tmp_path)) == 2


def test_a_run_that_goes_on_has_its_earlier_steps(tmp_path: Path) -> None:
    with Tracker(RUN, 0, tmp_path, tmp_path, [point(0)]) as tracker:
        assert lines(tmp_path) == [point(0)]
        tracker.log(point(1))
    assert lines(tmp_path) == [point(0), point(1)]


# --- the mirror ----------------------------------------------------------------------------------------


def test_every_step_reaches_the_mirror(tmp_path: Path, server: Path) -> None:
    with Tracker(RUN, 0, tmp_path, tmp_path, [point(0)]) as tracker:
        tracker.log(point(1, **{"train/loss": math.nan, "reward/mean": 0.5}))
    ((identity, run),) = on_server(server).items()
    assert identity.startswith("my_study-dvp-seed0-")
    assert run["config"]["arm"] == "dvp" and run["config"]["seed"] == 0
    assert [step["train/step"] for step in run["steps"]] == [0, 1]
    assert run["steps"][0] == at_a_glance(point(0)) and math.isnan(run["steps"][1]["train/loss"])
    assert run["steps"][1]["At a glance/reward"] == 0.5
    assert run["ends"] == [0]


def test_a_failed_run_is_mirrored_as_failed(tmp_path: Path, server: Path) -> None:
    with pytest.raises(ZeroDivisionError), Tracker(RUN, 0, tmp_path, tmp_path) as tracker:
        tracker.log(point(0))
        raise ZeroDivisionError
    (run,) = on_server(server).values()
    assert (len(run["steps"]), run["ends"]) == (1, [1])


FAULTS = ["error at import", "error at init", "error at step 0", "error at step 1", "error at finish"]
FAULTS += ["death at init", "death at step 1"]
SILENCES = ["silence at import", "silence at init", "silence at step 0", "silence at finish"]


@pytest.mark.parametrize("fault", rest_long([*FAULTS, "silence at step 0"], FAULTS + SILENCES))
def test_no_fault_of_wandb_reaches_training(
    tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    """Whatever fails, wherever: the file is whole, and one line says how to mirror it."""
    monkeypatch.setenv("FAKE_WANDB_FAULT", fault)
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setattr(tracker, "FINISH_SECONDS", 1 if fault in SILENCES else 60)
    track(RUN, tmp_path)
    assert lines(tmp_path) == [point(0), point(1)]
    said = capfd.readouterr().err
    assert said.count("tailrl: warning: W&B lacks something of this run (") == 1
    assert f"`wandb sync {tmp_path}/wandb/*run-*` sends what W&B has written" in said
    assert "very-secret" not in said and "Traceback" not in said
    assert ("the server cannot be reached" in said) == fault.startswith("error")
    assert all(run["ends"] == [] for run in on_server(server).values())


def test_no_process_for_the_mirror_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    track(RUN, tmp_path)
    assert len(lines(tmp_path)) == 2
    assert "W&B lacks something of this run (No such file or directory)" in capsys.readouterr().err


# --- names, and a run that goes on -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_goes_on_sends_what_the_server_lacks(
    tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server falls silent in the middle of a run; from its checkpoint the run goes on, and is not made again."""
    steps = [point(step, **{"time/step": 1.0 + step}) for step in range(4)]
    monkeypatch.setenv("FAKE_WANDB_FAULT", "silence at step 2")
    monkeypatch.setattr(tracker, "FINISH_SECONDS", 2)
    with Tracker(RUN, 0, tmp_path, tmp_path) as tracked:
        for step in steps:
            tracked.log(step)
        assert tracked.mirror.process is not None
        end = time.monotonic() + 60
        while sum(len(run["steps"]) for run in on_server(server).values()) < 2:
            assert tracked.mirror.process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
    ((identity, run),) = on_server(server).items()
    assert len(run["steps"]) == 2
    monkeypatch.delenv("FAKE_WANDB_FAULT")
    monkeypatch.setattr(tracker, "FINISH_SECONDS", 60)
    with Tracker(RUN, 0, tmp_path, tmp_path, steps[:3]) as tracked:
        tracked.log(steps[3])
    ((again, run),) = on_server(server).items()
    assert again == identity and run["steps"] == [at_a_glance(step) for step in steps]


def test_a_seed_that_is_trained_again_is_another_run(tmp_path: Path, server: Path) -> None:
    for begun in (1.0, 1.5):
        with Tracker(RUN, 0, tmp_path, tmp_path) as tracked:
            tracked.log(point(0, **{"time/step": begun}))
    assert len(on_server(server)) == 2


def test_names_of_runs_differ() -> None:
    arms = ["dvp_1.5", "dvp_1-5", "dvp-1.5", "dvp_1+5", "rho=0.34-V"]
    records = [{"study": "s", "arm": arm, "seed": seed} for arm in arms for seed in (0, 1, 10)]
    names = {wandb_mirror.run_name(record) for record in records}
    assert len(names) == len(records)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") for name in names)
    assert wandb_mirror.run_name({"study": "my_study", "arm": "dvp", "seed": 0}) == "my_study-dvp-seed0"


# --- the real W&B --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_is_offline_unless_it_is_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed has one folder, and training it again replaces that folder and no other: in what a sweep left, too."""
    monkeypatch.delenv("WANDB_MODE")
    for name, value in (("SWEEP_ID", "0a1b2c3d"), ("LAUNCH", "true"), ("RUN_ID", "another"), ("RESUME", "must")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for other in ("dvp-seed0-0a1b2c3d", "dvp-seed1-0a1b2c3d", "dvp-dvp-seed0-0a1b2c3d"):
        (tmp_path / "wandb" / f"offline-run-20260101_000000-my_study-{other}").mkdir(parents=True)
    track(RUN, tmp_path)
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    folders = sorted(path.name.split("-", 3)[3] for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert folders == [
        "my_study-dvp-dvp-seed0-0a1b2c3d",
        written.stem.removeprefix("run-"),
        "my_study-dvp-seed1-0a1b2c3d",
    ]
    assert written.stem.startswith("run-my_study-dvp-seed0-")
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", written],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"^run +dvp-seed0 \(my_study-dvp-seed0-", shown, re.MULTILINE)
    summary = shown.partition("\nsummary\n")[2].splitlines()
    assert [line.rsplit(maxsplit=1)[0].strip() for line in summary[:2]] == ["At a glance/k3", "At a glance/reward"]


@pytest.mark.parametrize("key", rest_long(("short", None), ("0" * 40, "short", None)))
def test_a_server_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], key: str | None
) -> None:
    """It takes connections and says nothing; or W&B has a key that is none, or no key."""
    environment: Mapping[str, str] = {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        if key is not None:
            monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setattr(tracker, "FINISH_SECONDS", 3)
        track(RUN, tmp_path)
    assert lines(tmp_path) == [point(0), point(1)]
    said = capfd.readouterr().err
    assert said.count("tailrl: warning: W&B lacks something of this run (") == 1
    assert "Traceback" not in said and (key or "Traceback") not in said
