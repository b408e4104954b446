"""A study that is killed at random and started again ends as one that nobody disturbed; `make chaos` is longer."""

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import chaos
import kills
import numpy as np
import outcome
import pytest
import victims
from kills import AIMS, RECORDS, STARTS, Struck
from learning import demand_learning
from safetensors.numpy import save_file

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
    """Of a record, the fields too."""
    found = {"a": b"1", "b": [1], "d": 0, "e": {"x": 1, "y": 2, "z": 3}}
    expected = {"a": b"1", "b": [2], "c": {"x": b""}, "e": {"x": 1, "y": 3}}
    with pytest.raises(SystemExit, match=r"^not as undisturbed: b, d, e \(y, z\), c$"):
        outcome.compare(found, expected)


# --- whether it has learned --------------------------------------------------------------------------

LEARNED = {"train/dvp_mis/seed0": 0.5, "train/naive/seed0": 1.0}


def write_weights(policy: Path, value: float) -> None:
    policy.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.full((2, 3), value, dtype=np.float32)}, policy / "model.safetensors")


def write_norms(results: Path, run: str, *norms: float | None) -> None:
    (results / run / "metrics.jsonl").write_text("".join(f"{json.dumps({'train/grad_norm': n})}\n" for n in norms))


def write_learned(results: Path) -> list[Path]:
    """A study's weights and gradient norms as they should be; returns the folders of its runs."""
    write_weights(results / "base", 0.0)
    for value, run in enumerate(LEARNED, start=1):
        write_weights(results / run / "policy", value)
    write_norms(results, "train/dvp_mis/seed0", 0.0, 0.3, None, 0.1)
    write_norms(results, "train/naive/seed0", 0.2, 0.2)
    return [results / run for run in LEARNED]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_runs_that_have_learned_pass(tmp_path: Path) -> None:
    assert demand_learning(tmp_path, write_learned(tmp_path)) == LEARNED


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights of the base": (
        lambda results: write_weights(results / "train/naive/seed0/policy", 0.0),
        "train/naive/seed0: its weights are those of the base policy",
    ),
    "weights of another run": (
        lambda results: write_weights(results / "train/naive/seed0/policy", 1.0),
        "train/naive/seed0: its weights are those of train/dvp_mis/seed0",
    ),
    "too few gradients": (
        lambda results: write_norms(results, "train/dvp_mis/seed0", 0.0, 0.3, 0.0),
        "train/dvp_mis/seed0: only 33% of its steps have a gradient",
    ),
    "no number is no gradient": (
        lambda results: write_norms(results, "train/naive/seed0", float("nan"), float("inf"), None),
        "train/naive/seed0: only 0% of its steps have a gradient",
    ),
    "no steps": (
        lambda results: write_norms(results, "train/naive/seed0"),
        "train/naive/seed0: only 0% of its steps have a gradient",
    ),
    "steps without the metric": (
        lambda results: (results / "train/naive/seed0/metrics.jsonl").write_text("{}\n"),
        "train/naive/seed0: no gradient norms in metrics.jsonl: KeyError",
    ),
    "no metrics": (
        lambda results: (results / "train/naive/seed0/metrics.jsonl").unlink(),
        "train/naive/seed0: no gradient norms in metrics.jsonl: FileNotFoundError",
    ),
    "no weights": (
        lambda results: (results / "train/naive/seed0/policy/model.safetensors").unlink(),
        "train/naive/seed0/policy: holds no weights",
    ),
    "damaged weights": (
        lambda results: truncate(results / "train/naive/seed0/policy/model.safetensors"),
        "train/naive/seed0/policy: its weights cannot be read: ",
    ),
    "no base": (lambda results: (results / "base/model.safetensors").unlink(), "base: holds no weights"),
}


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_a_run_that_has_not_learned_is_named(tmp_path: Path, plant: Callable[[Path], object], sentence: str) -> None:
    runs = write_learned(tmp_path)
    plant(tmp_path)
    with pytest.raises(SystemExit) as ended:
        demand_learning(tmp_path, runs)
    assert isinstance(ended.value.code, str) and ended.value.code.startswith(sentence)
    assert "\n" not in ended.value.code


def test_the_harness_demands_learning_of_every_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder stands for the undisturbed and the disturbed study, so that no other check can fail."""
    study = chaos.Chaos(tmp_path / "study", "exact")
    write_learned(study.results)
    write_weights(study.results / "train/naive/seed0/policy", 0.0)
    monkeypatch.setattr(chaos, "COMMAND", "true {study}")
    with pytest.raises(SystemExit, match=r"^train/naive/seed0: its weights are those of the base policy"):
        study.finish()
    with pytest.raises(SystemExit, match=r"^train/naive/seed0: its weights are those of the base policy"):
        study.compare(outcome.final(study.results))


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
