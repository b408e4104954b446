"""A folder whose name anybody can guess: it is this user's alone, or it is not used."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tailrl.runtime import devices
from tailrl.runtime.errors import StudyError
from tailrl.runtime.private_folder import private_folder


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_for_this_user_alone(shared: Path) -> None:
    folder = private_folder("x")
    assert folder == private_folder("x") == shared / "x"
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("open", "is open to other users"),
        ("a link", "is no folder"),
        ("a broken link", "cannot be made"),
        ("a file", "cannot be made"),
        pytest.param("another user's", "is another user's", marks=pytest.mark.skipif(os.getuid() != 0, reason="root")),
    ],
)
def test_a_folder_of_somebody_else_is_refused(shared: Path, kind: str, words: str) -> None:
    """By the GPU locks too: who can write there could make a job wait for ever."""
    folder = shared / f"tailrl-gpus-{os.getuid()}"
    elsewhere = shared / "elsewhere"
    if kind == "a file":
        folder.touch()
    elif kind == "open":
        folder.mkdir()
        folder.chmod(0o770)
    elif kind == "another user's":
        folder.mkdir(0o700)
        os.chown(folder, 65534, 65534)
    else:
        folder.symlink_to(elsewhere)
        if kind == "a link":
            elsewhere.mkdir(0o700)
    with pytest.raises(StudyError, match=rf"^{folder}: {words}"):
        private_folder(folder.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with pytest.raises(StudyError, match=rf"^{folder}: {words}"):
            devices.take(1)
    assert not elsewhere.exists() or not list(elsewhere.iterdir())
