"""Tracking: the file is the truth, W&B's offline folder mirrors it."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from tailrl.metrics import METRICS
from tailrl.settings import Run
from tailrl.study import parse_study
from tailrl.tracking import SHOWN, Tracker, wandb_id

STUDY = parse_study(
    {
        "name": "my_study",
        "training": {"steps": 2},
        "arms": {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-13"}}},
        "ablations": {"rho": {"base": "dvp", "field": "vocabulary.rho", "values": ["0.34/V"]}},
    }
)
RUN = STUDY.run("dvp")


def point(step: int, **changes: float) -> dict[str, float]:
    return dict.fromkeys(METRICS, 0.25) | {"train/step": float(step)} | changes


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No W&B but what the test asks for, and no terminal."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    wandb.teardown()  # it remembers the mode of the process's first run
    yield
    wandb.teardown()


def track(run: Run, folder: Path, seed: int = 0) -> None:
    with Tracker(run, seed, folder, folder) as tracker:
        tracker.log(point(0))
        tracker.log(point(1))


def test_every_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(RUN, 3, tmp_path, tmp_path) as tracker:
        tracker.log(point(0, **{"reward/mean": 0.5, "rollout_corr/chi2_seq": math.inf}))
        # A run that is killed has written every step that it finished.
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        tracker.log(point(1, **{"train/loss": math.nan, "policy/entropy": 0.1 + 0.2}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == point(0) | {"reward/mean": 0.5, "rollout_corr/chi2_seq": None}
    assert lines[1] == point(1) | {"train/loss": None, "policy/entropy": 0.1 + 0.2}
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("dvp seed 3  step 1/2  reward 0.5") and len(shown) == 2


def test_what_is_shown_is_measured() -> None:
    assert SHOWN.keys() <= METRICS.keys()


def test_an_error_leaves_what_was_logged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Tracker(RUN, 0, tmp_path, tmp_path) as tracker:
        tracker.log(point(0))
        raise ZeroDivisionError
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert tracker.file.closed


def test_a_run_that_starts_again_starts_its_file_again(tmp_path: Path) -> None:
    track(RUN, tmp_path)
    track(RUN, tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_goes_on_has_its_earlier_steps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline nothing of the interrupted run is left but its folder, which is replaced: W&B gets every step again."""
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()
    logged: list[float] = []
    log = wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda self, data, *a, **k: (logged.append(data["train/step"]), log(self, data, *a, **k))
    )
    with Tracker(RUN, 0, tmp_path, tmp_path) as tracker:
        tracker.log(point(0, **{"train/loss": math.nan}))
        tracker.log(point(1))
    whole = (tmp_path / "metrics.jsonl").read_text()
    with Tracker(RUN, 0, tmp_path, tmp_path, [point(0, **{"train/loss": math.nan})]) as tracker:
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        tracker.log(point(1))
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert logged == [0, 1, 0, 1]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize(("resumed", "expected"), [(True, [3, 4]), (False, [0, 1, 2, 3, 4])])
def test_a_server_is_not_told_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, expected: list[int]
) -> None:
    """It has the steps of the interrupted process up to 2; the run goes on from 4. Where it has nothing: all."""
    told: list[int] = []

    class Server:
        def __init__(self, **given: object) -> None:
            assert given["resume"] == "allow" and given["id"] == wandb_id(RUN, 0)
            self.resumed, self.summary = resumed, {"train/step": 2.0} if resumed else {}

        def log(self, data: dict[str, float]) -> None:
            told.append(int(data["train/step"]))

        def define_metric(self, *_: object, **__: object) -> None:
            return

        def finish(self, exit_code: int) -> None:
            assert exit_code == 0

    monkeypatch.setattr(wandb, "init", Server)
    with Tracker(RUN, 0, tmp_path, tmp_path, [point(step) for step in range(4)]) as tracker:
        tracker.log(point(4))
    assert told == expected
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_runs_have_one_id_and_differ() -> None:
    identities = {wandb_id(STUDY.run(arm), seed) for arm in STUDY.all_arms() for seed in (0, 1, 10)}
    assert len(identities) == 9
    assert wandb_id(RUN, 0) == wandb_id(RUN, 0) == "my_study-dvp-seed0"
    assert re.fullmatch(r"my_study-rho-0-34-V-seed1-[0-9a-f]{8}", wandb_id(STUDY.run("rho=0.34-V"), 1))


def test_arms_that_differ_in_punctuation_have_different_ids() -> None:
    study = parse_study({"name": "s", "arms": {"dvp_1.5": {}, "dvp_1-5": {}, "dvp-1.5": {}, "dvp_1+5": {}}})
    assert len({wandb_id(study.run(arm), 0) for arm in study.arms}) == 4


def test_wandb_is_offline_unless_it_is_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed has one folder, and training it again replaces that folder and no other."""
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()
    for seed in (0, 1, 0):
        track(RUN, tmp_path, seed)
    folders = sorted(path.name.split("-", 3)[3] for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert folders == ["my_study-dvp-seed0", "my_study-dvp-seed1"]
    assert all(list(path.glob("*.wandb")) for path in (tmp_path / "wandb").glob("offline-run-*"))


def test_training_again_leaves_other_arms_alone(tmp_path: Path) -> None:
    study = parse_study({"name": "dvp", "arms": {"mis": {}, "dvp-mis": {}}})
    folder = tmp_path / "wandb" / f"offline-run-20260101_000000-{wandb_id(study.run('dvp-mis'), 0)}"
    folder.mkdir(parents=True)
    track(study.run("mis"), tmp_path)
    assert folder.exists()
