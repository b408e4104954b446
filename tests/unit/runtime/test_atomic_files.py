"""Files that are complete or absent, on a disk whose power may be cut at any moment."""

from pathlib import Path

import pytest
from power_cut import Disk

from tailrl.runtime.atomic_files import rename_whole, sync, sync_files, whole_folder, write_whole

NEW, OLD = b"new " * 1000, b"old"


@pytest.mark.parametrize("before", [None, OLD])
def test_a_file_is_complete_or_as_before_and_stays(
    before: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    if before is not None:
        path.write_bytes(before)
    disk = Disk(tmp_path, monkeypatch)
    write_whole(NEW, tmp_path / "writing", path)
    assert {outcome.get("state") for outcome in disk.outcomes} == {before, NEW}
    assert disk.after() == ({"state": NEW}, {"state": NEW})


FILES = {"a": NEW, "b/c": NEW[:-1], "b/d/e": NEW[:-2]}


def fill(folder: Path) -> None:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("before", [False, True])
def test_a_folder_is_complete_or_as_before_and_stays(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results"
    if before:
        path.mkdir()
        (path / "a").write_bytes(OLD)
    earlier = {"results/a": OLD} if before else {}
    complete = {f"results/{name}": data for name, data in FILES.items()}
    disk = Disk(tmp_path, monkeypatch)
    with whole_folder(path, "writing") as aside:
        fill(aside)
    for outcome in disk.outcomes:
        left = {name: data for name, data in outcome.items() if name.startswith("results/")}
        assert left in (earlier, complete)
    assert disk.after() == (complete, complete)


def test_a_folder_that_others_filled_is_brought_to_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several ranks fill it, before the first one renames it."""
    disk = Disk(tmp_path, monkeypatch)
    fill(tmp_path / "writing")
    rename_whole(tmp_path / "writing", tmp_path / "step")
    complete = {f"step/{name}": data for name, data in FILES.items()}
    for outcome in disk.outcomes:
        assert {name: data for name, data in outcome.items() if name.startswith("step/")} in ({}, complete)
    assert disk.after() == (complete, complete)


def test_what_a_job_wrote_is_on_the_disk_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    fill(tmp_path)
    late, early = disk.after()
    assert not late and not any(early.values())
    sync(tmp_path)
    assert disk.after() == (FILES, FILES)


def test_files_are_on_the_disk_with_their_names_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b" / "d").mkdir(parents=True)
    disk = Disk(tmp_path, monkeypatch)
    fill(tmp_path)
    sync_files(tmp_path / "a", tmp_path / "b" / "c")
    late, _ = disk.after()
    assert late == {"a": FILES["a"], "b/c": FILES["b/c"]}


def test_a_disk_without_power_keeps_what_was_brought_to_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture itself: each call that is left out, or comes too late, shows."""
    disk = Disk(tmp_path, monkeypatch)
    (tmp_path / "writing").write_bytes(NEW)
    (tmp_path / "writing").replace(tmp_path / "state")
    assert disk.after() == ({}, {"state": b""})
    sync_files(tmp_path / "state")
    assert {"state": b""} in disk.outcomes
    assert disk.after() == ({"state": NEW}, {"state": NEW})
