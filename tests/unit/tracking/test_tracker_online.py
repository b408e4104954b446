"""The real W&B, online, with a server on this machine that is slow, fails, hangs up, answers garbage or dies midway."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wandb_server import FAULTS, MIDWAY, MIDWAY_FAULTS, Server, online

from tailrl.config.load import parse_study
from tailrl.tracking import tracker
from tailrl.tracking.metrics import METRICS
from tailrl.tracking.tracker import Tracker

STEPS, PATIENCE = 6, 8
RUN = parse_study({"name": "my_study", "training": {"steps": STEPS}, "arms": {"naive": {}}}).run("naive")
POINTS = [dict.fromkeys(METRICS, 1.0) | {"train/step": float(step)} for step in range(STEPS)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with online(tmp_path, monkeypatch) as started:
        monkeypatch.setattr(tracker, "FINISH_SECONDS", PATIENCE)
        yield started


def train(folder: Path, met: Callable[[], object]) -> tuple[float, float, int]:
    """A run's steps as training logs them, which ends when W&B has `met` what it is to meet.

    Returns:
        The seconds that the steps took, those that the end took, and the mirror's exit code.
    """
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with Tracker(RUN, 0, folder, folder) as tracked:
        for point in POINTS:
            tracked.log(point)
        logged = time.monotonic() - begun
        while not met() and time.monotonic() < begun + 120:
            time.sleep(0.1)
        begun = time.monotonic()
    written = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == POINTS
    assert tracked.mirror.process is not None
    return logged, time.monotonic() - begun, tracked.mirror.process.returncode


def on_server(server: Server) -> list[float]:
    """The steps of the only run."""
    (steps,) = server.steps.values()
    return [step["train/step"] for step in steps]


@pytest.mark.slow
def test_a_server_that_works_has_every_step(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker, "FINISH_SECONDS", 60)
    train(tmp_path / "run", lambda: True)
    assert on_server(server) == [point["train/step"] for point in POINTS]
    assert "warning" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_costs_no_step_and_little_time(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tracker, "say", said.append)
    server.fault = fault
    midway = fault in MIDWAY_FAULTS
    logged, ended, code = train(tmp_path / "run", lambda: any(server.steps.values()) if midway else server.requests)
    assert logged < 5, "no step waits for the server"
    assert ended < PATIENCE + 10
    assert server.requests
    whole = any(len(steps) == STEPS for steps in server.steps.values())
    # For W&B's client a status of 200 is a receipt, whatever stands below it.
    receipt = fault == "garbage midway"
    assert len(said) == (code != 0)
    if whole or receipt:
        assert code in (0, -signal.SIGKILL), "it ended well, or was cut off when patience was at its end"
    else:
        assert code != 0
    assert all(line.startswith("warning: W&B lacks something of this run (") for line in said)
    if midway:
        assert not whole and [len(steps) for steps in server.steps.values()] == [MIDWAY]
