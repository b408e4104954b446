"""Removes the lock that a killed Snakemake leaves in its folder."""

import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tailrl.runtime.errors import StudyError, say

LOCKS, HOST = Path(".snakemake/locks"), Path(".snakemake/host")
"""Snakemake's locks; and the workflow's note of its machine and, in a second line, of an executor elsewhere."""
OPTION = re.compile(r"-[a-zA-Z]*?([mcXW])(.*)")
"""Python's options that take a value, alone or behind others: -m, -Im, -Xdev, -c."""
PAUSE = 0.2
"""Seconds between two checks of the running jobs."""


def remove_stale_lock(folder: Path) -> bool:
    """Removes the lock of a Snakemake that has ended, and says so on stderr; False if the folder has no lock.

    First it waits for jobs that outlived their Snakemake: two processes would write the same files. It does not wait
    for training, which keeps a second process out by itself (`Checkpoints.held`), so that other arms can go on.

    Raises:
        StudyError: a Snakemake runs in the folder; or it ran on another machine, or its jobs on a cluster, whose
            processes cannot be seen from here.
    """
    locks = sorted((folder / LOCKS).glob("*.lock"))
    if not locks:
        return False
    noted = (folder / HOST).read_text(encoding="utf-8") if (folder / HOST).exists() else platform.node()
    host, _, executor = noted.strip().partition("\n")
    if host != platform.node():
        raise StudyError(
            f"{folder}: locked by a Snakemake on {host}; where none runs there any more, say snakemake --unlock"
        )
    for process, here in running_snakemakes(folder).items():
        if not here:
            raise StudyError(
                f"{folder}: another user's Snakemake is running, as process {process}, here or elsewhere; where it is "
                "not here, say snakemake --unlock"
            )
        raise StudyError(f"{folder}: a Snakemake is running here already, as process {process}")
    if executor:
        raise StudyError(
            f"{folder}: locked by a Snakemake that gave its jobs to {executor}, where they may still run and write; "
            "when none of them is left, say snakemake --unlock"
        )
    said: set[int] = set()
    while jobs := running_jobs(folder):
        for process in jobs.keys() - said:
            say(f"{folder}: {jobs[process]}, process {process}, outlived its Snakemake; waiting for its end")
        said |= jobs.keys()
        time.sleep(PAUSE)
    for lock in locks:
        lock.unlink(missing_ok=True)
    say(f"{folder}: the lock of a Snakemake that was killed is removed")
    return True


def running_snakemakes(folder: Path) -> dict[int, bool]:
    """The processes of this machine that run Snakemake in the folder and hold its lock.

    False marks another user's Snakemake: the system does not tell in which folder it works.
    """
    return {
        process: here
        for process, command, here in _processes(folder)
        if is_snakemake(command) and "--nolock" not in command
    }


def running_jobs(folder: Path) -> dict[int, str]:
    """The processes of this machine that write results in the folder, without training, and what each is."""
    found = {}
    for process, command, _ in _processes(folder):
        if is_snakemake(command) and "--report" in command:
            found[process] = "report.html"
        elif len(command) > 3 and Path(command[1]).name == "tailrl" and "--out" in command and command[3] != "train":
            found[process] = f"tailrl {command[2]} {command[3]}" if command[2] == "job" else f"tailrl {command[2]}"
    return found


def is_snakemake(command: list[str]) -> bool:
    """Whether a command line runs Snakemake: its script or its module, in a Python with any options."""
    words = iter(command)
    if not Path(next(words, "")).name.startswith("python"):
        words = iter(command)
    for word in words:
        if not word.startswith("-"):
            return Path(word).name == "snakemake"
        if match := OPTION.fullmatch(word):
            value = match[2] or next(words, "")
            if match[1] == "m":
                return value.partition(".")[0] == "snakemake"
            if match[1] == "c":
                return False
    return False


def _processes(folder: Path) -> Iterator[tuple[int, list[str], bool]]:
    """The processes that work in the folder, with their command lines; False marks another user's Snakemake."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command, place = process.info["cmdline"], process.info["cwd"]  # None where the system does not tell
        if command and (_same(place, folder) if place else _hidden(process, place) and is_snakemake(command)):
            yield process.pid, command, place is not None


def _hidden(process: psutil.Process, place: str | None) -> bool:
    """Whether the system does not tell where a process works, though it has not ended."""
    try:
        return place is None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _same(place: str, folder: Path) -> bool:
    try:
        return Path(place).samefile(folder)
    except OSError:
        return False  # it is gone
