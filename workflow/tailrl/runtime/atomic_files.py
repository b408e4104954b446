"""Files that are whole or not there, and their checksums."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrl.runtime.errors import StudyError, reason

LOCK = "lock"
"""In a run's folder of checkpoints: one process at a time has it."""


class DamagedError(StudyError):
    """A file is not as it was written: that is known by its checksum."""

    def __init__(self, file: Path, words: str) -> None:
        """Args:
        file: the one that is damaged.
        words: what is wrong.
        """
        super().__init__(words)
        self.file = file


def checksum(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal; raises StudyError where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise StudyError(f"{file}: cannot be read: {reason(error)}") from None


def write_whole(data: bytes, aside: Path, path: Path) -> None:
    """Write a file aside and move it to its place in one go: whole or not there, after a power cut too."""
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _sync(path.parent)


@contextmanager
def whole_folder(path: Path, name: str) -> Iterator[Path]:
    """Give a new folder of this name beside `path`, and move it there in the end: whole or not there, likewise.

    What lay at `path` before goes. Where something is raised within, `path` stays as it was.
    """
    aside = path.with_name(name)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        yield aside
        sync(aside)
        shutil.rmtree(path, ignore_errors=True)
        aside.replace(path)
        _sync(path.parent)
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def sync(folder: Path) -> None:
    """Bring a folder and everything in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def forget_finished(folder: Path) -> None:
    """Remove the second names of a finished run's results, and its folder of checkpoints with them.

    Left alone where a process trains in it, or a state of another run lies there.

    Args:
        folder: the run's `checkpoints`.
    """
    try:
        lock = (folder / LOCK).open("a+")
    except OSError:
        return  # there is none
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if any(folder.glob("finished-*")) and not any(folder.glob("step-*")):
            shutil.rmtree(folder, ignore_errors=True)


def link_tree(source: Path, target: Path) -> None:
    """A new folder with the files of another one under second names, or copies where there are no hard links.

    Their time is now, so that Snakemake takes them for newer than what they were made from.
    """
    shutil.copytree(source, target, copy_function=link)


def link(source: str | Path, target: str | Path) -> None:
    """One file likewise."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.utime(target)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
