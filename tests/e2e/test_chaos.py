"""A study that is killed at random and started again ends as one that nobody disturbed; `make chaos` is longer."""

import csv
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import chaos
import kills
import outcome
import pytest
import victims
from kills import AIMS, RECORDS, STARTS, Struck

SEED = 156
"""Both kills strike everything: one while a checkpoint is written, one while the results of a run are."""


def test_two_kills(tmp_path: Path) -> None:
    struck = chaos.run(tmp_path, 2, "exact", seed=SEED, out=tmp_path / "kills.csv")
    assert [row.aim for row in struck] == [kill.aim for kill in kills.plan(2, SEED)]
    assert [row.at for row in struck] == ["checkpoint", "results"]
    with (tmp_path / "kills.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["at"] for row in rows] == [row.at for row in struck]


@pytest.mark.slow
@pytest.mark.vllm
def test_ten_kills_with_vllm(tmp_path: Path) -> None:
    assert len(chaos.run(tmp_path, 10, "vllm", seed=1)) == 10


def test_a_difference_is_named() -> None:
    with pytest.raises(SystemExit, match=r"^not as undisturbed: b, d, c$"):
        outcome.compare({"a": b"1", "b": [1], "d": 0}, {"a": b"1", "b": [2], "c": {"x": b""}})


# --- what is planned and said ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_ten_kills_meet_every_part_of_a_study(seed: int) -> None:
    planned = kills.plan(40, seed)
    for first in range(0, 40, 10):
        assert Counter(kill.aim for kill in planned[first : first + 10]) == Counter(AIMS)
        ordered = [victims.STAGES.index(k.aim) for k in planned[first : first + 10] if k.aim in victims.STAGES]
        assert ordered == sorted(ordered), "else a study would have to be begun anew for each"
    assert all(0 <= kill.share < 1 for kill in planned)
    assert all(kill.mode != "one job" for kill in planned if kill.aim in (STARTS, RECORDS))
    assert all(before.mode != "one job" for before, kill in pairwise(planned) if kill.aim == STARTS)


def test_a_seed_is_a_plan() -> None:
    """In any process: Python hashes texts differently in each."""
    command = [sys.executable, "-c", "import kills; print([kills.plan(n, 3) for n in (2, 10, 37)])"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert shown.strip() == str([kills.plan(n, 3) for n in (2, 10, 37)])
    assert kills.plan(10, 3) != kills.plan(10, 4)
    assert [len(kills.plan(n, 3)) for n in (1, 2, 37)] == [1, 2, 37]


def test_the_table_counts_every_kill() -> None:
    rows = [("training", "everything"), ("training", "train naive seed0"), (STARTS, "Snakemake"), ("problems", "x")]
    struck = [Struck(1, 1, "training", killed, at, "", False, 1.0) for at, killed in rows]
    assert kills.table(struck).splitlines()[2:] == [
        f"| {STARTS} | 0 | 1 | 0 |",
        "| training | 1 | 0 | 1 |",
        "| problems | 0 | 0 | 1 |",
    ]


# --- whom it strikes ---------------------------------------------------------------------------------


def test_every_process_is_found_and_killed(tmp_path: Path) -> None:
    """One that has left the group and the folder, as W&B's does, too; and nobody else's."""
    script = "import time\nprint('runs', flush=True)\ntime.sleep(60)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | mark,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for mark in ({victims.MARK: str(tmp_path / "study")}, {victims.MARK: str(tmp_path / "other")}, {})
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        assert list(victims.marked(tmp_path / "study")) == [started[0].pid]
        victims.kill_all(tmp_path / "study")
        assert started[0].wait() == -9
        assert [process.poll() for process in started[1:]] == [None, None]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_what_a_training_job_does_shows_in_its_files(tmp_path: Path) -> None:
    run = tmp_path / "results" / "chaos" / "train" / "naive" / "seed0"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "tailrl").write_text("print('runs', flush=True); import time; time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "tailrl"), "job", "train", "--out", str(run.relative_to(tmp_path))],
        env=os.environ | {victims.MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
    )

    def stage() -> str:
        (job,) = victims.jobs(tmp_path)
        assert (job.process, job.name, job.run) == (process.pid, "train naive seed0", run)
        return job.stage

    try:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        assert stage() == "engine starts"
        lock, metrics = run / "checkpoints" / "lock", run / "metrics.jsonl"
        metrics.write_text("{}\n")
        os.utime(metrics, (100, 100))
        lock.write_text(f"{process.pid} on node1\n")
        assert stage() == "engine starts", "the steps are an earlier process's"
        metrics.touch()
        os.utime(lock, (200, 200))
        assert stage() == "training"
        (run / "checkpoints" / "writing.safetensors").touch()
        assert stage() == "checkpoint"
        lock.write_text("1\n")
        metrics.touch()
        assert stage() == "engine starts", "another process trains, and this one waits"
    finally:
        process.kill()
        process.communicate()
