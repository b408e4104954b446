"""The catalogue of bad checkpoints: each is named in one sentence and left out, and the one before it is used."""

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from power_cut import Disk, write_survivors
from safetensors import safe_open
from safetensors.torch import load_file, save
from state_fixture import advance, new_state, snapshot
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.runtime.errors import StudyError
from tailrl.training import checkpoints, kept_data
from tailrl.training.checkpoint_files import HEADER
from tailrl.training.checkpoints import Checkpoints
from tailrl.training.state import RunState

OURS, THEIRS = {"settings": "a", "seed": "0"}, {"settings": "b", "seed": "0"}


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """The checkpoints of the run: none yet."""
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints", 2, OURS)


@pytest.fixture
def state(model: PreTrainedModel, saved: Checkpoints) -> RunState:
    return new_state(model, saved)


def files(saved: Checkpoints) -> list[Path]:
    return sorted(saved.folder.glob("step-*"))


# --- what may be wrong with a file ---------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def part_of(state: Path) -> Path:
    (part,) = state.glob("*.safetensors")
    return part


def cut(file: Path, length: int = 0) -> None:
    os.truncate(file, length)


def renamed(state: Path, header: bytes) -> None:
    """With this header, the folder has the name of its checksum: nothing but its content is wrong."""
    (state / HEADER).write_bytes(header)
    first, _, _ = state.name.rpartition("-")
    state.rename(state.with_name(f"{first}-{hashlib.sha256(header).hexdigest()[:16]}"))


def forged(
    tensors: Callable[[dict[str, Tensor]], object] = lambda _: None,
    header: Callable[[dict[str, Any]], object] = lambda _: None,
) -> Callable[[Path], None]:
    """A whole state, some of its tensors or of its numbers changed."""

    def change(state: Path) -> None:
        part, known = part_of(state), json.loads((state / HEADER).read_bytes())
        with safe_open(part, framework="pt") as opened:
            metadata = dict(opened.metadata())
        weights, shares = load_file(part), json.loads(metadata[SHARES])
        tensors(weights)
        header(known["numbers"])
        metadata[SHARES] = json.dumps({name: shares.get(name, {"saved_offsets": [0]}) for name in weights})
        data = save(weights, metadata)
        part.write_bytes(data)
        known["parts"] = {part.name: {"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        renamed(state, json.dumps(known).encode())

    return change


def file_instead(state: Path) -> None:
    shutil.rmtree(state)
    state.write_bytes(b"{}")


def pickled(state: Path) -> None:
    """A part with its checksum: it is read as safetensors alone, and never unpickled."""
    known, data = json.loads((state / HEADER).read_bytes()), pickle.dumps({"model": 1})
    part_of(state).write_bytes(data)
    known["parts"] = {part_of(state).name: {"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    renamed(state, json.dumps(known).encode())


def metrics_of(file: Path) -> Path:
    (found,) = file.parent.glob("metrics-*")
    return found


def tokens_of_step_one(file: Path) -> Path:
    return sorted(file.parent.glob("tokens-*"))[1]


NORM = "model.model.norm.weight"
SHARES = "DCP_SHARDING_INFO"
CHECKSUM = "damaged, since the checksum of its checkpoint.json is not the one in its name"
PART, NO_STATE = " is damaged, since its checksum is not the one in checkpoint.json", "no state could be read from it ("
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit": (lambda state: flip(part_of(state)), PART),
    "cut short": (lambda state: cut(part_of(state), 1000), PART),
    "no byte": (lambda state: cut(part_of(state)), PART),
    "zeros, as after a power cut": (lambda state: part_of(state).write_bytes(bytes(1000)), PART),
    "something behind its end": (lambda state: part_of(state).write_bytes(part_of(state).read_bytes() + b"x"), PART),
    "a pickle": (lambda state: part_of(state).write_bytes(pickle.dumps({"model": 1})), PART),
    "a pickle with its checksum": (pickled, NO_STATE),
    "one bit of its numbers": (lambda state: flip(state / HEADER), CHECKSUM),
    "no numbers": (lambda state: (state / HEADER).unlink(), CHECKSUM),
    "a file": (file_instead, CHECKSUM),
    "numbers that are none": (lambda state: renamed(state, b"[]"), NO_STATE),
    "a weight that is missing": (forged(lambda tensors: tensors.pop(NORM)), NO_STATE + "its policy has other weights"),
    "a weight of another size": (
        forged(lambda tensors: tensors.update({NORM: torch.ones(3)})),
        NO_STATE + "its policy has other weights",
    ),
    "a tensor of another kind": (forged(lambda tensors: tensors.update({"x.y": torch.ones(3)})), NO_STATE),
    "no step": (forged(header=lambda numbers: numbers.pop("step")), NO_STATE),
    "no thresholds": (forged(header=lambda numbers: numbers.pop("thresholds")), NO_STATE),
    "thresholds that are a list": (forged(header=lambda numbers: numbers.update(thresholds=[])), NO_STATE),
    "no tokens": (forged(header=lambda numbers: numbers.pop("tokens")), NO_STATE),
    "no metrics": (forged(header=lambda numbers: numbers.pop("metrics")), NO_STATE),
}
SHARED: dict[str, tuple[Callable[[Path], object], str]] = {
    "metrics cut short": (
        lambda file: os.truncate(metrics_of(file), metrics_of(file).stat().st_size // 2),
        "the metrics in metrics-",
    ),
    "metrics with one digit changed": (
        lambda file: metrics_of(file).write_bytes(metrics_of(file).read_bytes().replace(b"1.0", b"1.5")),
        "the metrics in metrics-",
    ),
    "a step's tokens that are gone": (
        lambda file: tokens_of_step_one(file).unlink(),
        "the tokens of step 1 in tokens-00000001-",
    ),
    "a step's tokens with one bit changed": (
        lambda file: flip(tokens_of_step_one(file)),
        "the tokens of step 1 in tokens-00000001-",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED | SHARED)
def test_a_bad_checkpoint_is_named_and_the_one_before_it_used(
    state: RunState, saved: Checkpoints, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    change, words = (DAMAGED | SHARED)[damage]
    advance(state)
    first, before = saved.save(state), snapshot(state)
    advance(state)
    change(saved.save(state))
    (bad,) = set(files(saved)) - {first}
    assert saved.resume(state)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"tailrl: {bad}: ") and words in said[0] and said[0].endswith(", left out")
    assert said[1:] == [f"tailrl: {first}: the run goes on from step 1"]
    assert snapshot(state) == before and state.resumed == [1]
    assert files(saved) == [first], "what is bad is removed"
    assert state.tokens.joined()["step"].tolist() == [0, 0, 0]
    advance(state)
    assert [line["train/step"] for line in state.metrics.read()] == [0.0, 1.0], "what was written since is written over"


@pytest.mark.parametrize("damage", DAMAGED | SHARED)
def test_where_no_checkpoint_is_usable_all_stay(
    state: RunState, saved: Checkpoints, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """There may be a copy somewhere; to train from the first step is the user's decision."""
    change, words = (DAMAGED | SHARED)[damage]
    for _ in range(2):
        advance(state)
    file = saved.save(state)
    advance(state)
    before = snapshot(state)
    change(file)
    left = files(saved)
    with pytest.raises(StudyError, match=r": damaged, and none of this run's checkpoints \(1\) can be used"):
        saved.resume(state)
    assert words in capsys.readouterr().err
    assert files(saved) == left and len(left) == 1
    assert snapshot(state) == before and state.resumed == [], "of a file that cannot be taken up nothing is"


def test_two_checkpoints_on_the_same_damaged_file_both_stay(state: RunState, saved: Checkpoints) -> None:
    for _ in range(2):
        advance(state)
    whole = [saved.save(state)]
    advance(state)
    whole.append(saved.save(state))
    metrics = state.metrics.file
    metrics.write_bytes(b"x" + metrics.read_bytes()[1:])
    with pytest.raises(StudyError, match=rf"^{metrics}: damaged, and none of this run's checkpoints \(2\)"):
        saved.resume(state)
    assert files(saved) == whole


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another run": (lambda _: None, "of a run with other settings; training starts anew"),
    "of another run, and damaged": (lambda file: cut(file / HEADER, 100), "of an unknown run; training starts anew"),
    "of a version that wrote one file": (file_instead, "of an unknown run; training starts anew"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_named_and_stays(
    state: RunState, saved: Checkpoints, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    change, words = OTHERS[other]
    advance(state)
    file = Checkpoints(saved.folder, 2, THEIRS).save(state)
    change(file)
    assert not saved.resume(state)
    assert capsys.readouterr().err == f"tailrl: {file}: {words}\n"
    assert file.exists()


def test_a_half_written_checkpoint_is_named_and_removed(
    state: RunState, saved: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    advance(state)
    first = saved.save(state)
    aside = saved.folder / checkpoints.UNFINISHED
    shutil.copytree(first, aside)
    (aside / HEADER).unlink()
    assert saved.resume(state)
    assert capsys.readouterr().err.startswith(f"tailrl: {aside}: half-written, left out\n")
    assert files(saved) == [first]


def test_a_full_disk_under_the_tokens_ends_the_run_in_a_sentence(state: RunState, saved: Checkpoints) -> None:
    """The system itself says that no space is left, to whatever is written to /dev/full."""
    (saved.folder / kept_data.UNFINISHED).symlink_to("/dev/full")
    words = r"checkpoints: the tokens of step 0 could not be kept \(No space left on device\): they need 0\.0 MB$"
    with pytest.raises(StudyError, match=words):
        advance(state)
    assert state.tokens.checksums == {} and list(saved.folder.iterdir()) == []


def test_a_full_disk_under_the_metrics_ends_the_run_in_a_sentence(state: RunState) -> None:
    state.metrics.file.symlink_to("/dev/full")
    with pytest.raises(StudyError, match=r"a step's metrics, \d+ bytes, could not be kept: "):
        state.metrics.add({"train/step": 0.0})
    assert state.metrics.length == 0


def test_a_new_run_has_no_kept_data(state: RunState) -> None:
    assert (state.tokens.joined(), state.metrics.read()) == ({}, [])


def test_missing_metrics_are_named(state: RunState, saved: Checkpoints) -> None:
    advance(state)
    saved.save(state)
    state.metrics.file.unlink()
    with pytest.raises(StudyError, match=rf"^{state.metrics.file}: damaged, and none of this run's checkpoints"):
        saved.resume(state)


def test_truncated_metrics_are_not_filled_with_zeros(state: RunState) -> None:
    """To write at a place beyond a file's end would leave zeros before it."""
    advance(state)
    os.truncate(state.metrics.file, 3)
    with pytest.raises(StudyError, match=rf"^the metrics in {state.metrics.file.name} are damaged$"):
        state.metrics.add({"train/step": 1.0})
    assert state.metrics.file.stat().st_size == 3


def test_metrics_that_cannot_be_flushed_leave_the_last_checkpoint(
    state: RunState, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance(state)
    first = saved.save(state)
    advance(state)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    words = r"the checkpoint of step 2 could not be saved \(No space left on device\): it needs \d+\.\d MB, and "
    with pytest.raises(StudyError, match=words):
        saved.save(state)
    assert files(saved) == [first]


def test_a_power_cut_at_any_moment_leaves_a_state_to_go_on_from(
    state: RunState, saved: Checkpoints, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last one, or the one before it, with its metrics and tokens: whatever was on the disk at that moment."""
    disk, before = Disk(saved.folder, monkeypatch), 0
    for step in (1, 2, 3, 4):
        advance(state)
        saved.save(state)
        for number, survivors in enumerate((*disk.outcomes, *disk.after())):
            left = Checkpoints(write_survivors(survivors, tmp_path / f"{step}-{number}"), 2, OURS)
            again = new_state(model, left)
            assert left.resume(again) or not before
            assert again.step in (before, step)
        assert (again.step, snapshot(again)) == (step, snapshot(state))
        before = step
        disk.outcomes.clear()


def test_a_checkpoint_does_not_grow_with_the_steps(state: RunState, saved: Checkpoints) -> None:
    """But for the checksum of a kept step."""
    sizes = []
    for steps in (2, 20):
        for _ in range(steps):
            advance(state)
        sizes.append(sum(file.stat().st_size for file in saved.save(state).iterdir()))
    assert sizes[1] - sizes[0] < 20 * 100
