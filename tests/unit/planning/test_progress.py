"""The progress of a study against files made by hand: nothing yet, runs under way, stopped ones, all done."""

import json
import os
from pathlib import Path

import pytest

from tailrl.config.study import Study
from tailrl.planning.progress import progress_page, runs_of, seconds_left

NOW = 2_000_000_000.0
STUDY = Study.model_validate(
    {"name": "s", "seeds": [0, 1], "training": {"steps": 10},
     "arms": {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-13"}, "seeds": [0]}}}
)  # fmt: skip


def record(folder: Path, run: str, steps: int, seconds: float, *, ago: float = 5.0, finished: bool = False) -> None:
    out = folder / "train" / run
    out.mkdir(parents=True)
    lines = [json.dumps({"train/step": step, "time/step": seconds}) + "\n" for step in range(steps)]
    (out / "metrics.jsonl").write_text("".join(lines))
    os.utime(out / "metrics.jsonl", (NOW - ago, NOW - ago))
    if finished:
        (out / "manifest.json").write_text("{}")


def test_nothing_is_estimated_before_the_first_step(tmp_path: Path) -> None:
    page = progress_page(STUDY, tmp_path, NOW)
    assert page.startswith("s: 0 of 3 runs trained, 0 under way; 0 of 30 steps, 0 %\n")
    assert "no step is recorded yet" in page and "an estimate" not in page.replace("there is no estimate", "")


def test_the_time_left_is_the_steps_left_by_their_seconds_shared_by_the_runs_under_way(tmp_path: Path) -> None:
    """naive takes 60 s a step and dvp 90: of naive 4 + 10 steps are left, of dvp 8."""
    record(tmp_path, "naive/seed0", 6, 60.0)
    record(tmp_path, "dvp/seed0", 2, 90.0)
    found = list(runs_of(STUDY, tmp_path, NOW))
    assert seconds_left(found) == pytest.approx((14 * 60 + 8 * 90) / 2)
    page = progress_page(STUDY, tmp_path, NOW)
    assert page.startswith(
        "s: 0 of 3 runs trained, 2 under way; 8 of 30 steps, 27 %\ntraining may take 13 min more (an"
    )


def test_an_arm_without_a_step_takes_the_others_time_and_a_stopped_run_is_not_under_way(tmp_path: Path) -> None:
    record(tmp_path, "naive/seed0", 10, 30.0, finished=True)
    record(tmp_path, "naive/seed1", 5, 50.0, ago=3600.0)
    found = list(runs_of(STUDY, tmp_path, NOW))
    assert [(run.finished, run.under_way) for run in found] == [(True, False), (False, False), (False, False)]
    assert seconds_left(found) == pytest.approx((5 + 10) * 40.0)
    assert "one at a time, for none is under way now" in progress_page(STUDY, tmp_path, NOW)


def test_a_line_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    record(tmp_path, "naive/seed0", 3, 1.0)
    with (tmp_path / "train/naive/seed0/metrics.jsonl").open("a") as file:
        file.write('{"train/step": 3, "time/st')
    os.utime(tmp_path / "train/naive/seed0/metrics.jsonl", (NOW, NOW))
    assert next(runs_of(STUDY, tmp_path, NOW)).done == 3


def test_when_training_is_done_the_evaluations_are_counted(tmp_path: Path) -> None:
    for run in ("naive/seed0", "naive/seed1", "dvp/seed0"):
        record(tmp_path, run, 10, 1.0, finished=True)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "base.json").write_text("{}")
    page = progress_page(STUDY, tmp_path, NOW)
    assert page.endswith("training is done; 1 of 3 evaluations, and the page is not there yet\n")
