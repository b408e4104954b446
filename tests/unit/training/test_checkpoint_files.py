"""Checkpoints of ranks: each writes its share, any number takes them up, and damaged parts are named."""

import json
import re
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks_fixture import on_ranks
from safetensors import safe_open
from state_fixture import advance, new_state, snapshot
from step_fixture import run_of
from transformers import PreTrainedModel

from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.training import checkpoint_files, checkpoints
from tailrl.training.checkpoint_files import HEADER
from tailrl.training.checkpoints import Checkpoints
from tailrl.training.placement import place
from tailrl.training.state import RunState

RUN = {"settings": "a"}


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints", 2, RUN)


def states(saved: Checkpoints) -> list[Path]:
    return sorted(saved.folder.glob("step-*"))


def placed(model: PreTrainedModel, saved: Checkpoints, dtype: str = "float32") -> RunState:
    place(model, run_of({}, dtype=dtype).training)
    return new_state(model, saved)


def save(model: PreTrainedModel, saved: Checkpoints, steps: int = 1, dtype: str = "float32") -> Any:
    """A checkpoint after each of so many steps; the last state."""
    state = placed(model, saved, dtype)
    for _ in range(steps):
        advance(state)
        saved.save(state)
    return snapshot(state)


def take_up(model: PreTrainedModel, saved: Checkpoints, dtype: str = "float32") -> Any:
    state = placed(model, saved, dtype)
    assert saved.resume(state)
    return snapshot(state), state.resumed


@pytest.mark.parametrize(("before", "after"), [pytest.param(3, 2, marks=pytest.mark.slow), (2, 1), (1, 2)])
def test_any_number_of_ranks_takes_up_the_same_bits(
    model: PreTrainedModel, saved: Checkpoints, tmp_path: Path, before: int, after: int
) -> None:
    """In bfloat16, so that one rank has sharded weights too; a process without ranks takes up each."""
    expected = on_ranks(before, tmp_path, save, model, saved, 1, "bfloat16")[0]
    for (tensors, numbers), resumed in on_ranks(after, tmp_path, take_up, model, saved, "bfloat16"):
        assert tensors == expected[0] and resumed == [1]
        assert numbers["thresholds"] == expected[1]["thresholds"]
    (alone, numbers), resumed = take_up(model, saved)
    assert alone == expected[0] and numbers == expected[1] and resumed == [1]


def test_each_rank_writes_its_own_share(
    model: PreTrainedModel, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte once, half of the sharded ones by each of two ranks, and at any time no more than a few as a file."""
    monkeypatch.setattr(checkpoint_files, "PART_BYTES", 100_000)
    tensors, _ = on_ranks(2, tmp_path, save, model, saved)[0]
    (state,) = states(saved)
    header = json.loads((state / HEADER).read_text(encoding="utf-8"))
    assert {name: part["length"] for name, part in header["parts"].items()} == {
        file.name: file.stat().st_size for file in state.iterdir() if file.name != HEADER
    }
    written: dict[str, dict[str, int]] = {}
    for name in header["parts"]:
        with safe_open(state / name, framework="pt") as opened:
            sizes = {key: opened.get_tensor(key).nbytes for key in opened.keys()}  # noqa: SIM118 - no mapping
        assert sum(sizes.values()) <= 100_000 + max(sizes.values())
        own = written.setdefault(name.split("-")[1], {})
        assert own.keys().isdisjoint(sizes)
        own |= sizes
    assert sum(sum(own.values()) for own in written.values()) == sum(map(len, tensors.values()))
    # A stale engine's weights are whole on every rank: one of them writes each.
    sharded = [sum(size for key, size in own.items() if not key.startswith("past.")) for own in written.values()]
    assert [size / sum(sharded) for size in sharded] == pytest.approx([0.5, 0.5], abs=0.01)
    assert len(header["parts"]) > 10


# --- damage ------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def part(state: Path) -> Path:
    return sorted(state.glob("*.safetensors"))[-1]


def swap(state: Path) -> None:
    """The parts of the checkpoint before it, which are whole themselves."""
    shutil.copyfile(part(sorted(state.parent.glob("step-*"))[0]), part(state))


def exchange(state: Path) -> None:
    first, *_, last = sorted(state.glob("*.safetensors"))
    aside = first.rename(state / "aside")
    last.rename(first)
    aside.rename(last)


NAME = r"shard-00002-\S+\.safetensors"
OTHER = rf"its part {NAME} is damaged, since its checksum is not the one in checkpoint\.json"
HEADERS = r"damaged, since the checksum of its checkpoint\.json is not the one in its name"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit of a part": (lambda state: flip(part(state)), OTHER),
    "an empty part": (lambda state: part(state).write_bytes(b""), OTHER),
    "a missing part": (lambda state: part(state).unlink(), rf"its part {NAME} is missing"),
    "a folder for a part": (lambda state: part(state).unlink() or part_folder(state), OTHER),
    "a part of another checkpoint": (swap, OTHER),
    "exchanged parts": (exchange, r"its part shard-00001-\S+ is damaged, since its checksum is not the one in \S+"),
    "a foreign part": (
        lambda state: shutil.copyfile(part(state), state / "shard-00003.safetensors"),
        r"shard-00003\.safetensors in it is none of its parts",
    ),
    "one bit of the header": (lambda state: flip(state / HEADER), HEADERS),
    "no header": (lambda state: (state / HEADER).unlink(), HEADERS),
    "a file in its place": (lambda state: shutil.rmtree(state) or state.write_bytes(b"{}"), HEADERS),
}


def part_folder(state: Path) -> None:
    (state / "shard-00002-model-00001-of-00001.safetensors").mkdir()


FEW = ("one bit of a part", "a missing part", "one bit of the header")


@pytest.mark.parametrize("kinds", [FEW, pytest.param(tuple(DAMAGED), marks=pytest.mark.slow)], ids=["few", "all"])
def test_damage_is_named_and_the_checkpoint_before_it_used(
    kinds: Sequence[str],
    model: PreTrainedModel,
    saved: Checkpoints,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On one process, and on two ranks, of which one alone reads the damaged part."""
    on_ranks(2, tmp_path, save, model, saved, 2)
    whole = tmp_path / "whole"
    shutil.copytree(saved.folder, whole)
    for number, damage in enumerate(kinds):
        change, words = DAMAGED[damage]
        shutil.rmtree(saved.folder)
        shutil.copytree(whole, saved.folder)
        first, last = states(saved)
        change(last)
        capfd.readouterr()
        ranks = number % 2 + 1
        for _, resumed in on_ranks(ranks, tmp_path, take_up, model, saved):
            assert resumed == [1], damage
        said = capfd.readouterr().err.splitlines()
        said = [line for line in said if line.startswith("tailrl")]
        assert len(said) == 2, damage
        assert re.fullmatch(rf"tailrl: {last}: {words}, left out", said[0]), damage
        assert said[1] == f"tailrl: {first}: the run goes on from step 1", damage
        assert states(saved) == [first], damage


def refused(model: PreTrainedModel, saved: Checkpoints) -> str:
    state = placed(model, saved)
    with pytest.raises(StudyError) as caught:
        saved.resume(state)
    return str(caught.value)


def test_where_no_checkpoint_is_whole_all_stay(model: PreTrainedModel, saved: Checkpoints, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, save, model, saved, 2)
    for state in states(saved):
        flip(part(state))
    for sentence in on_ranks(2, tmp_path, refused, model, saved):
        assert re.fullmatch(
            rf"{states(saved)[0]}/{NAME}: damaged, and none of this run's checkpoints \(2\) can be used; put it back "
            rf"from a copy, or remove {saved.folder} to train from the first step",
            sentence,
        )
    assert len(states(saved)) == 2


def test_a_checkpoint_of_another_run_is_named_and_stays(
    model: PreTrainedModel, saved: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, tmp_path, save, model, Checkpoints(saved.folder, 2, {"settings": "b"}))
    assert not saved.resume(new_state(model, saved))
    (other,) = states(saved)
    assert capsys.readouterr().err == f"tailrl: {other}: of a run with other settings; training starts anew\n"


# --- a disk that is full, and a kill -----------------------------------------------------------------------


def on_a_full_disk(model: PreTrainedModel, saved: Checkpoints) -> tuple[str, Any]:
    """The second rank may write no more than 1 kB in a file, once."""
    state = placed(model, saved)
    advance(state)
    saved.save(state)
    advance(state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if distributed.number() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    with pytest.raises(StudyError) as caught:
        saved.save(state)
    left = sorted(path.name for path in saved.folder.iterdir() if path.is_dir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    distributed.gathered(None)
    saved.save(state)
    return str(caught.value), left


def test_a_full_disk_leaves_the_last_checkpoint(model: PreTrainedModel, saved: Checkpoints, tmp_path: Path) -> None:
    ended = on_ranks(2, tmp_path, on_a_full_disk, model, saved)
    first, second = states(saved)
    for sentence, left in ended:
        assert left == [first.name], "and what was half-written is removed"
        assert re.fullmatch(
            rf"{saved.folder}: the checkpoint of step 2 could not be saved \(File too large \(ulimit -f\)\): it needs "
            rf"\d+\.\d MB, and \d+\.\d MB are free; {first.name} is kept",
            sentence,
        )
    assert second.name.startswith("step-00000002-")


def test_a_half_written_checkpoint_is_named_and_removed(
    model: PreTrainedModel, saved: Checkpoints, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, tmp_path, save, model, saved)
    aside = saved.folder / checkpoints.UNFINISHED
    shutil.copytree(states(saved)[0], aside)
    (aside / HEADER).unlink()
    on_ranks(2, tmp_path, take_up, model, saved)
    assert f"tailrl: {aside}: half-written, left out\n" in capfd.readouterr().err
    assert not aside.exists() and len(states(saved)) == 1
