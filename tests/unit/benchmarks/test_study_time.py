"""The seconds of a study's jobs, and the share that is training itself."""

import json
import os
import sys
from pathlib import Path

import pytest
import study_time

from tailrl.artifacts.tables import read_csv


def test_seconds_are_summed_by_kind_of_job(tmp_path: Path) -> None:
    def write(name: str, *lines: dict[str, float | None]) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    write("benchmarks/policy.jsonl", {"s": 7.0})
    write("benchmarks/evaluate/a.jsonl", {"s": 3.0}, {"s": 4.0})
    step = {"time/rollout": 2.0, "time/forward": 1.0, "time/backward": 0.5, "time/optimizer": 0.25, "time/metrics": 9.0}
    for seed in range(2):
        write(f"benchmarks/train/a/seed{seed}.jsonl", {"s": 20.0})
        write(f"train/a/seed{seed}/metrics.jsonl", step, step | {"time/backward": None})
    for name, seconds in (("data/train.jsonl", 100), ("summary.html", 175)):
        write(name)
        os.utime(tmp_path / name, (seconds, seconds))
    rows = {row["part"]: (row["jobs"], row["seconds"], row["working_seconds"]) for row in study_time.time_of(tmp_path)}
    assert rows == {
        "warm start": (1, 7.0, ""),
        "training": (2, 40.0, 14.0),
        "evaluation": (2, 7.0, ""),
        "whole": (5, 75.0, ""),
    }


def test_rows_of_other_runs_stay_and_those_of_this_run_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "study_time.csv"
    for run, seconds in (("slow", 9.0), ("fast", 5.0), ("fast", 2.0)):
        monkeypatch.setattr(study_time, "time_of", lambda _, took=seconds: [{"part": "whole", "seconds": took}])
        monkeypatch.setattr(sys, "argv", ["study_time.py", "results/x", "--run", run, "--out", str(out)])
        study_time.main()
    assert [(row["run"], row["seconds"]) for row in read_csv(out)] == [("slow", "9.0"), ("fast", "2.0")]
