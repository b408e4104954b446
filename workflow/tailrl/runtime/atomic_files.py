"""Files that are complete or absent, and their checksums."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tailrl.runtime.errors import StorageError, reason
from tailrl.runtime.limits import regular

LOCK = "lock"
"""A file in a run's folder of checkpoints, which one process at a time locks."""


class DamagedError(StorageError):
    """A file's checksum shows that the file was changed after it was written."""

    def __init__(self, file: Path, words: str) -> None:
        """The damaged file, and a sentence that says what is wrong."""
        super().__init__(words)
        self.file = file

    def __reduce__(self) -> tuple[type["DamagedError"], tuple[Path, str]]:
        """For another rank, to which it may be sent."""
        return type(self), (self.file, str(self))


def checksum(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal; raises StudyError where it cannot be read."""
    try:
        with open(file, "rb", opener=regular) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {reason(error)}") from None


def write_whole(data: bytes, aside: Path, path: Path) -> None:
    """Write a file aside, then rename it: complete or absent, after a power cut too."""
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    _sync(path.parent)


@contextmanager
def whole_folder(path: Path, name: str) -> Iterator[Path]:
    """A new folder of this name beside `path`, renamed to `path` at the end: complete or absent, likewise.

    It replaces what lay at `path`. If the block raises, `path` keeps its earlier content.
    """
    aside = path.with_name(name)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        yield aside
        rename_whole(aside, path)
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def rename_whole(aside: Path, path: Path) -> None:
    """Flush a folder and everything in it to the disk, then rename it; it replaces what lay at `path`."""
    sync(aside)
    shutil.rmtree(path, ignore_errors=True)
    aside.replace(path)
    _sync(path.parent)


@contextmanager
def unchanged(files: Iterable[str | Path]) -> Iterator[None]:
    """Around a block that reads a user's files: raises StudyError if one is changed meanwhile."""

    def states() -> list[tuple[int, int, int]]:
        return [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in map(os.stat, filter(os.path.exists, files))]

    files = list(files)
    before = states()
    yield
    if states() != before:
        raise StorageError(f"{', '.join(map(str, files))}: changed while this job read it; run the study again")


def sync(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def sync_files(*files: Path) -> None:
    """Flush files and their names to the disk, and nothing else in their folders: another job may be writing there."""
    for path in (*files, *{file.parent for file in files}):
        _sync(path)


def hold(path: Path) -> IO[bytes] | None:
    """Open a file and lock it until it is closed or this process ends; None if another process holds it.

    Raises OSError if the file system has no locks.
    """
    import fcntl  # not on Windows, where files are read alone

    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def forget_finished(folder: Path) -> None:
    """Remove a finished run's folder `checkpoints`, with the second names of its results.

    It stays if a process trains in it, or if it holds another run's state.
    """
    import fcntl

    try:
        lock = (folder / LOCK).open("a+")
    except OSError:
        return  # no such folder
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if any(folder.glob("finished-*")) and not any(folder.glob("step-*")):
            shutil.rmtree(folder, ignore_errors=True)


def link_tree(source: Path, target: Path) -> None:
    """A new folder with hard links to the files of another one; copies, where the disk has no hard links."""
    shutil.copytree(source, target, copy_function=link)


def link(source: str | Path, target: str | Path) -> None:
    """One file likewise. Its time is now, so that Snakemake takes it for newer than its inputs."""
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
