"""What a finished run gives is not lost, whatever Snakemake saw of its end."""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases_fixture import rest_long
from power_cut import Disk
from run_fixture import Interrupted, Runs, interrupt_at, make_runs
from transformers import PreTrainedTokenizerBase

from tailrl.artifacts.manifest import MANIFEST, read_manifest, write_manifest
from tailrl.config.source_files import at_start
from tailrl.runtime import atomic_files
from tailrl.runtime.atomic_files import forget_finished
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training import checkpoints, loop, results
from tailrl.training.checkpoints import Checkpoints
from tailrl.training.placement import decided

OUTPUTS = ("manifest.json", "metrics.jsonl", "policy", "run.json", "tokens.npz")
FEW = {"steps": 3}


@pytest.fixture
def runs(tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    return make_runs(tmp_path, policy_folder, problems, monkeypatch)


def remove_outputs(out: Path) -> None:
    """As Snakemake does before it starts a job again."""
    for name in OUTPUTS:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink()


def files_of(out: Path) -> list[Path]:
    return [path for name in OUTPUTS for path in (out / name, *(out / name).rglob("*")) if path.is_file()]


def contents(out: Path) -> dict[str, bytes]:
    """The outputs, file for file."""
    return {str(path.relative_to(out)): path.read_bytes() for path in files_of(out)}


def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "take_step", lambda *_: pytest.fail("a step was taken"))


# --- a run that is finished ----------------------------------------------------------------------------


def test_a_finished_run_without_outputs_is_restored_not_retrained(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when only Snakemake was killed: its job went on and finished unseen."""
    out, run = runs.folder / "out", runs.settings(**FEW)
    runs.train(run)
    before, inode = contents(out), (out / "tokens.npz").stat().st_ino
    assert {name.partition("/")[0] for name in before} == set(OUTPUTS)
    remove_outputs(out)
    no_step(monkeypatch)
    capsys.readouterr()
    for _ in range(2):  # with the outputs removed, and with them there
        runs.train(run)
        assert contents(out) == before
        assert f"tailrl: {out}: this run is finished; its results are restored\n" in capsys.readouterr().err
    assert (out / "tokens.npz").stat().st_ino == inode, "a second name takes no space"


def test_an_edit_of_a_source_file_is_seen_at_the_end_and_training_starts_anew_for_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results stay, with the digest that the file had at the start."""
    source, out, run = runs.folder / "source.py", runs.folder / "out", runs.settings(**FEW)
    source.write_text("1\n", encoding="utf-8")
    for module in (checkpoints, results):
        monkeypatch.setattr(module, "job_files", lambda *_: (str(source),))
    take_step = loop.take_step

    def edit(*arguments: Any) -> Any:
        source.write_text("2\n", encoding="utf-8")
        return take_step(*arguments)

    monkeypatch.setattr(loop, "take_step", edit)
    runs.train(run)
    assert "source.py changed while this job ran; its results stay" in capsys.readouterr().err
    assert list(read_manifest(out / MANIFEST).sources.values()) == [hashlib.sha256(b"1\n").hexdigest()[:16]]
    at_start.cache_clear()  # as in the next process
    runs.train(run)
    assert "restored" not in capsys.readouterr().err
    assert list(read_manifest(out / MANIFEST).sources.values()) == [hashlib.sha256(b"2\n").hexdigest()[:16]]


def test_damaged_problems_are_not_trained_on(runs: Runs) -> None:
    problems = runs.folder / "problems.jsonl"
    write_manifest(runs.folder / MANIFEST, [problems])
    problems.write_text(problems.read_text(encoding="utf-8").replace("1", "2", 1), encoding="utf-8")
    with pytest.raises(StudyError, match=r"problems\.jsonl: is not as its job left it"):
        runs.train(runs.settings(**FEW))


def test_restored_results_are_newer_than_their_inputs(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Snakemake would rerun the job again and again."""
    out, run, problems = runs.folder / "out", runs.settings(**FEW), runs.folder / "problems.jsonl"
    runs.train(run)
    remove_outputs(out)
    problems.touch()
    no_step(monkeypatch)
    runs.train(run)
    assert min(path.stat().st_mtime for path in files_of(out)) >= problems.stat().st_mtime


@pytest.mark.parametrize("other", [{"steps": 4}, {"learning_rate": 2e-2}])
def test_another_run_in_the_same_folder_is_trained(runs: Runs, other: dict[str, Any]) -> None:
    first = runs.train(runs.settings(**FEW))
    second = runs.train(runs.settings(**{**FEW, **other}))
    assert not second.same(first)
    assert len(list(runs.checkpoints.glob("finished-*"))) == 1, "what the folder held before is gone"


def test_without_hard_links_there_are_copies(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    out, run = runs.folder / "out", runs.settings(**FEW)
    runs.train(run)
    before = contents(out)
    remove_outputs(out)
    no_step(monkeypatch)
    synced: set[Path] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    runs.train(run)
    assert contents(out) == before
    assert set(files_of(out)) <= synced, "the originals may soon be removed"


def test_a_run_that_another_process_finished_is_not_trained_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is waited for, and its results are taken."""
    runs.train(runs.settings(**FEW), name="other")
    before, held, begun = contents(runs.folder / "other"), Checkpoints.held, threading.Event()

    def hold(self: Checkpoints) -> Any:
        begun.set()
        return held(self)

    monkeypatch.setattr(Checkpoints, "held", hold)
    no_step(monkeypatch)
    with held(Checkpoints(runs.checkpoints, 1, {})):
        thread = threading.Thread(target=lambda: runs.train(runs.settings(**FEW)))
        thread.start()
        begun.wait()
        (finished,) = (runs.folder / "other" / "checkpoints").glob("finished-*")
        finished.rename(runs.checkpoints / finished.name)
    thread.join()
    assert contents(runs.folder / "out") == before


def test_another_run_writes_nothing_into_the_results_of_a_finished_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of a run that goes on have the name that those of the finished one have too."""
    first = runs.train(runs.settings(**FEW))
    with monkeypatch.context() as patched:
        interrupt_at(patched, 2)
        with pytest.raises(Interrupted):
            runs.train(runs.settings(**{**FEW, "learning_rate": 2e-2}))
    no_step(monkeypatch)
    assert runs.train(runs.settings(**FEW)).same(first)


def change(file: Path) -> None:
    """In place, so that both names have it."""
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read()[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))


SPOILT: dict[str, Callable[[Path], object]] = {
    "run.json": lambda out: change(out / "run.json"),
    "policy/model.safetensors": lambda out: change(out / "policy" / "model.safetensors"),
    "tokens.npz": lambda out: next((out / "checkpoints").glob("finished-*/tokens.npz")).unlink(),
    "policy/more": lambda out: next((out / "checkpoints").glob("finished-*/policy")).joinpath("more").touch(),
    "manifest.json": lambda out: next((out / "checkpoints").glob("finished-*/manifest.json")).write_text("{"),
}


@pytest.mark.parametrize("file", SPOILT)
def test_damaged_results_are_not_restored(runs: Runs, file: str) -> None:
    out, run = runs.folder / "out", runs.settings(**FEW)
    runs.train(run)
    SPOILT[file](out)
    before = contents(out)
    changed = r"is not as its job left it, as manifest\.json shows; put it back, or remove \S+ and run the study again"
    words = rf"finished-\w+/{file}: ({changed}|not valid JSON)$"
    with pytest.raises(StudyError, match=words):
        runs.train(run)
    assert contents(out) == before


def test_second_names_are_removed_only_without_a_holder_or_states(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Snakefile does this at the end of a study."""
    runs.train(runs.settings(**FEW))
    with Checkpoints(runs.checkpoints, 1, {}).held():
        forget_finished(runs.checkpoints)
        assert list(runs.checkpoints.glob("finished-*")), "another process has the folder"
    interrupt_at(monkeypatch, 2)
    with pytest.raises(Interrupted):
        runs.train(runs.settings(**{**FEW, "checkpoint_every": 1, "learning_rate": 2e-2}))
    forget_finished(runs.checkpoints)
    assert list(runs.checkpoints.glob("finished-*")), "a state of another run lies there"
    for state in runs.checkpoints.glob("step-*"):
        shutil.rmtree(state)
    forget_finished(runs.checkpoints)
    assert not runs.checkpoints.exists()
    forget_finished(runs.checkpoints)  # as where a finished study is asked for again


# --- the moment of the end -----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", rest_long(("save_policy", "give"), ("save_policy", "sync", "give")))
def test_a_process_that_dies_as_it_writes_its_results_loses_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    undisturbed = runs.undisturbed(runs.settings())

    sync = atomic_files.sync

    def die(*arguments: object) -> None:
        if moment != "sync" or "writing-results" in str(arguments[0]):
            raise Interrupted
        sync(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr({"save_policy": results, "sync": atomic_files, "give": loop}[moment], moment, die)
        with pytest.raises(Interrupted):
            runs.train(runs.settings())
    assert len(runs.saved()) == 2, "no checkpoint goes before the results are there"
    if moment == "give":
        no_step(monkeypatch)
    again = runs.train(runs.settings())
    assert again.same(undisturbed)
    assert again.record["resumed_at_steps"] == ([] if moment == "give" else [6])


def test_the_results_are_on_the_disk_before_the_checkpoints_go(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of them under its name; a power cut before that leaves none of them under it."""
    runs.checkpoints.mkdir(parents=True)
    disk, clear = Disk(runs.checkpoints, monkeypatch), Checkpoints.clear

    def look(self: Checkpoints) -> None:
        name = f"{self.finished.name}/"
        written = {f"{name}{path.relative_to(self.finished)}": path.read_bytes() for path in files_of(self.finished)}
        assert len(written) > len(OUTPUTS)
        for survivors in disk.outcomes:
            assert {path: data for path, data in survivors.items() if path.startswith(name)} in ({}, written)
        assert all(written.items() <= survivors.items() for survivors in disk.after())
        disk.outcomes.clear()
        clear(self)

    monkeypatch.setattr(Checkpoints, "clear", look)
    runs.train(runs.settings(**FEW))


def test_a_full_disk_at_the_end_leaves_the_checkpoints(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = runs.undisturbed(runs.settings())

    def full(*_: object, **__: object) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers says it

    words = (
        r"could not be written \(.*No space left on device.*\): they need up to \d+\.\d MB, and \d+\.\d MB are free; "
        "the checkpoints are kept$"
    )
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
        with pytest.raises(StudyError, match=words):
            runs.train(runs.settings())
    assert not (runs.checkpoints / "writing-results").exists()
    assert runs.train(runs.settings()).same(undisturbed)


def test_a_full_disk_under_the_metrics_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the file that one looks at while a run goes on; the state before is taken up."""
    undisturbed = runs.undisturbed(runs.settings())
    take_step, metrics = loop.take_step, runs.folder / "out" / "metrics.jsonl"

    def full(job: Any, state: Any, *others: Any) -> Any:
        if state.step == 3:
            opened = next(fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == metrics)
            with Path("/dev/full").open("wb") as device:
                os.dup2(device.fileno(), int(opened.name))
        return take_step(job, state, *others)

    words = rf"{metrics}: a step's metrics, \d+ bytes, could not be written: No space left on device$"
    with monkeypatch.context() as patched:
        patched.setattr(loop, "take_step", full)
        with pytest.raises(StudyError, match=words):
            runs.train(runs.settings())
    assert runs.train(runs.settings()).same(undisturbed)


def test_the_record_says_what_was_trained(runs: Runs) -> None:
    run = runs.settings(**FEW)
    record = runs.train(run).record
    assert (record["arm"], record["seed"], record["settings"]) == (run.arm, 5, decided(run).model_dump(mode="json"))
