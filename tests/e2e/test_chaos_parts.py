"""The pieces of the harness that strikes a study (tests/chaos): what it demands of a study, and whom it strikes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hub
import numpy as np
import outcome
import pytest
import small_study
import victims
from disturbed import Disturbed
from kills import TWO_JOBS, Kill
from learning import demand_learning
from rows import Rows
from safetensors.numpy import save_file
from small_study import ENGINES, SmallStudy

from tailrl.config.load import read_study


def test_a_difference_is_named() -> None:
    """Of a record, the fields too."""
    found = {"a": b"1", "b": [1], "d": 0, "e": {"x": 1, "y": 2, "z": 3}}
    expected = {"a": b"1", "b": [2], "c": {"x": b""}, "e": {"x": 1, "y": 3}}
    with pytest.raises(SystemExit, match=r"^not as undisturbed: b, d, e \(y, z\), c$"):
        outcome.compare(found, expected)


# --- whether it has learned --------------------------------------------------------------------------

LEARNED = {"train/budget/seed0": 0.5, "train/difficulty/seed0": 1.0}


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
    write_norms(results, "train/budget/seed0", 0.0, 0.3, None, 0.1)
    write_norms(results, "train/difficulty/seed0", 0.2, 0.2)
    return [results / run for run in LEARNED]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_runs_that_have_learned_pass(tmp_path: Path) -> None:
    assert demand_learning(tmp_path, write_learned(tmp_path)) == LEARNED


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights of the base": (
        lambda results: write_weights(results / "train/difficulty/seed0/policy", 0.0),
        "train/difficulty/seed0: its weights are those of the base policy",
    ),
    "weights of another run": (
        lambda results: write_weights(results / "train/difficulty/seed0/policy", 1.0),
        "train/difficulty/seed0: its weights are those of train/budget/seed0",
    ),
    "too few gradients": (
        lambda results: write_norms(results, "train/budget/seed0", 0.0, 0.3, 0.0),
        "train/budget/seed0: only 33% of its steps have a gradient",
    ),
    "no number is no gradient": (
        lambda results: write_norms(results, "train/difficulty/seed0", float("nan"), float("inf"), None),
        "train/difficulty/seed0: only 0% of its steps have a gradient",
    ),
    "no steps": (
        lambda results: write_norms(results, "train/difficulty/seed0"),
        "train/difficulty/seed0: only 0% of its steps have a gradient",
    ),
    "steps without the metric": (
        lambda results: (results / "train/difficulty/seed0/metrics.jsonl").write_text("{}\n"),
        "train/difficulty/seed0: no gradient norms in metrics.jsonl: KeyError",
    ),
    "no metrics": (
        lambda results: (results / "train/difficulty/seed0/metrics.jsonl").unlink(),
        "train/difficulty/seed0: no gradient norms in metrics.jsonl: FileNotFoundError",
    ),
    "no weights": (
        lambda results: (results / "train/difficulty/seed0/policy/model.safetensors").unlink(),
        "train/difficulty/seed0/policy: holds no weights",
    ),
    "damaged weights": (
        lambda results: truncate(results / "train/difficulty/seed0/policy/model.safetensors"),
        "train/difficulty/seed0/policy: its weights cannot be read: ",
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
    study = SmallStudy(tmp_path / "study", "exact", "")
    write_learned(study.results)
    write_weights(study.results / "train/difficulty/seed0/policy", 0.0)
    monkeypatch.setattr(small_study, "COMMAND", "true {study} {targets}")
    with pytest.raises(SystemExit, match=r"^train/difficulty/seed0: its weights are those of the base policy"):
        study.finish()
    disturbed = Disturbed(study, Rows(None, [], "exact", 0), {}, outcome.final(study.results))
    with pytest.raises(SystemExit, match=r"^train/difficulty/seed0: its weights are those of the base policy"):
        disturbed.compare()


# --- what a kill must be followed by -----------------------------------------------------------------


def make_disturbed(folder: Path) -> Disturbed:
    """A finished study that has learned, with no kills."""
    study = SmallStudy(folder / "study", "exact", "")
    for run in write_learned(study.results):
        (run / "run.json").write_text(json.dumps({"resumed_at_steps": [4]}))
    return Disturbed(study, Rows(None, [], "exact", 0), {}, outcome.final(study.results))


def write_state(run: Path, step: int, process: int) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / f"step-{step:08d}-0-0").mkdir()
    (run / "checkpoints" / "lock").write_text(f"{process} on node1\n")


def test_a_run_that_had_a_state_must_go_on_from_its_newest(tmp_path: Path) -> None:
    disturbed = make_disturbed(tmp_path)
    run = disturbed.study.runs()[0]
    write_state(run, 2, process=7)
    write_state(run, 4, process=7)
    job = victims.Job(7, "training", "train budget seed0", run)
    assert disturbed.note_states([job], "Snakemake") == 0, "its process goes on"
    assert disturbed.note_states([replace(job, process=8)], "one job") == 0, "it waits for the one that trains"
    assert disturbed.note_states([job], "one job") == disturbed.note_states([job], "everything") == 1
    disturbed.expected = outcome.final(disturbed.study.results)
    disturbed.compare()
    assert disturbed.resumed == 1
    write_state(run, 6, process=7)
    disturbed.expected = outcome.final(disturbed.study.results)
    disturbed.note_states([job], TWO_JOBS)
    with pytest.raises(SystemExit, match=r"^train/budget/seed0: went on from step 4, though it had a state of step 6$"):
        disturbed.compare()
    (run / "run.json").write_text(json.dumps({"resumed_at_steps": []}))
    with pytest.raises(SystemExit, match=r"^train/budget/seed0: trained from the first step, though it had a state$"):
        disturbed.compare()


def test_an_aim_that_no_study_meets_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = make_disturbed(tmp_path)
    monkeypatch.setattr(small_study, "COMMAND", "true {study} {targets}")
    monkeypatch.setattr(SmallStudy, "begin_anew", lambda _: None)
    with pytest.raises(SystemExit, match=r"^kill 1: 4 studies finished, and none met 'evaluation'$"):
        disturbed.disturb([Kill("evaluation", "everything", 0.5)])


def test_a_finished_run_must_not_be_trained_again(tmp_path: Path) -> None:
    disturbed = make_disturbed(tmp_path)
    run = disturbed.study.runs()[1]
    (run / "checkpoints" / "finished-0").mkdir(parents=True)
    (run / "checkpoints" / "finished-0" / "run.json").write_text("{}")
    assert disturbed.note_states([], "everything") == 0
    disturbed.expected = outcome.final(disturbed.study.results)
    with pytest.raises(SystemExit, match=r"^train/difficulty/seed0: trained again, though it was finished$"):
        disturbed.compare()


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
    run = tmp_path / "results" / "chaos" / "train" / "difficulty" / "seed0"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "tailrl").write_text("print('runs', flush=True); import time; time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "tailrl"), "job", "train", "--out", str(run.relative_to(tmp_path))],
        env=os.environ | {victims.MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
    )

    def stage() -> str:
        (job,) = victims.jobs(tmp_path)
        assert (job.process, job.name, job.run) == (process.pid, "train difficulty seed0", run)
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
        (run / "checkpoints" / "writing-parts").mkdir()
        assert stage() == "checkpoint"
        lock.write_text("1\n")
        metrics.touch()
        assert stage() == "engine starts", "another process trains, and this one waits"
    finally:
        process.kill()
        process.communicate()


# --- what is downloaded ------------------------------------------------------------------------------


def test_the_hub_serves_a_folder_as_a_model(tmp_path: Path) -> None:
    """To huggingface_hub, as a download of a study's model asks for it; a file that is not there is none."""
    (tmp_path / "model").mkdir()
    data = bytes(range(256)) * 100
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    code = (
        "import sys; from huggingface_hub import file_exists, hf_hub_download as get; "
        f"print(get({hub.MODEL!r}, 'model.safetensors')); print(file_exists({hub.MODEL!r}, 'config.json'))"
    )
    with hub.serve(tmp_path / "model") as address:
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1"}
        environment.pop("HF_HUB_OFFLINE", None)
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
    path, exists = shown.stdout.splitlines()
    assert Path(path).read_bytes() == data and Path(path).is_relative_to(tmp_path)
    assert exists == "False"
    assert victims.downloading(tmp_path) == set()
    (Path(path).resolve().parent / "abc.incomplete").touch()
    assert {file.name for file in victims.downloading(tmp_path)} == {"abc.incomplete"}


def test_a_study_with_one_engine_leaves_the_next_its_own(tmp_path: Path) -> None:
    """The changes of one are not in the other's file, though both come from the same table."""
    found = {}
    for engine in ENGINES:
        made = SmallStudy(tmp_path / engine, engine, "")
        study = read_study(made.folder / made.study)
        run = study.run("difficulty")
        sampler = run.sampler
        found[engine] = (sampler.engine, sampler.kv_cache_dtype, sampler.quantization, run.training.routing_replay)
    assert found == {
        "exact": ("exact", "auto", None, False),
        "twin": ("exact", "fp8_e4m3", "int8", False),
        "vllm": ("vllm", "auto", None, False),
        "fp8": ("vllm", "fp8_e4m3", None, False),
        "int8": ("vllm", "auto", "int8", False),
        "int4": ("vllm", "auto", "int4", False),
        "moe": ("vllm", "auto", None, True),
    }
