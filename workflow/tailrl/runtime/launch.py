"""Starts the ranks of a job on this machine, and ends with their exit code.

The ranks meet in a private folder (`distributed.join`), not at a port. Exit codes say more than torchrun's do: the
training rule repeats a job that was killed or hung, and not one that reported bad input. On several machines torchrun
starts the same processes: `torchrun --no-python ... tailrl job train ...`.
"""

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from tailrl.runtime.errors import StudyError, say

FOLDER_VARIABLE = "TAILRL_LAUNCHER"  # in the ranks' environment: the launcher's folder, of mode 0700
KEY, STORE = "key", "store"  # files in it: what signs the values that ranks exchange, and where the ranks meet
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PATIENCE = 30  # seconds that a rank may take to end when it is asked to
BETWEEN_LOOKS = 0.1  # seconds
PR_SET_PDEATHSIG = 1


class _Stopped(BaseException):
    """A signal asks the launcher to end."""


def launch(ranks: int, command: Sequence[str]) -> None:
    """Run a command (a program and its arguments) as so many ranks, with the variables that torchrun sets.

    If one fails, the others are ended, and this process ends with its code. If this process is killed, so are they.

    Raises:
        StudyError: a rank reported bad input (`tell_launcher`).
    """
    with _stoppable(), TemporaryDirectory(prefix="tailrl-ranks-") as name:
        folder = Path(name)
        (folder / KEY).write_bytes(secrets.token_bytes(32))
        failures = _run(ranks, command, folder)
        # A rank that reported bad input counts, even if it was not the first to fail.
        for file in sorted(folder.glob("*/error.json")):
            raise StudyError(json.loads(file.read_text(encoding="utf-8"))["message"])
    if failures:
        # A killed process explains the others, as those that wait for it fail with 1.
        rank = min(failures, key=lambda rank: failures[rank] in (1, -signal.SIGTERM))
        code = failures[rank]
        why = ", as NCCL ends a rank that waited too long for another" if code == -signal.SIGABRT else ""
        say(f"rank {rank} of {ranks} ended with {code}{why}")
        sys.exit(code if code > 0 else 128 - code)


def run_beside(command: Sequence[str], environment: Mapping[str, str], output: Path, look: Callable[[], object]) -> int:
    """Run a program of another environment to its end; returns its exit code.

    A signal that ends this process asks the program to end, and kills it after `PATIENCE`. If this process is killed,
    so is the program.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        output: gets what it writes to stdout and stderr, behind what is there.
        look: is called every second, and once after the end.
    """
    with _stoppable(), output.open("ab") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_ends_with(os.getpid()),
        )
        number = signal.SIGTERM
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                look()
        except _Stopped as stopped:
            (number,) = stopped.args
            raise
        finally:
            _end([process], number)
        look()
        return process.returncode


@contextmanager
def _stoppable() -> Iterator[None]:
    """In the block a signal that ends a process raises `_Stopped`; behind it the process ends by that signal."""
    before = {number: signal.signal(number, _stop) for number in ENDING if not _is_ignored(number)}
    try:
        yield
    except _Stopped as stopped:
        # Not with a code: the shell then stops too.
        (number,) = stopped.args
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ends_with(parent: int) -> Callable[[], None]:
    """For a new process, before its program: it is killed where its parent ends."""
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return end_with_parent


def _is_ignored(number: int) -> bool:
    """Whether a signal stays ignored: SIGHUP of `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _stop(number: int, _: FrameType | None) -> None:
    raise _Stopped(number)


def _run(ranks: int, command: Sequence[str], folder: Path) -> dict[int, int]:
    """The exit codes of the ranks that failed by themselves, in the order in which they ended; empty if none failed."""
    end_with_launcher = _ends_with(os.getpid())
    processes: list[subprocess.Popen[bytes]] = []
    codes: dict[int, int] = {}
    try:
        for rank in range(ranks):
            (folder / str(rank)).mkdir()
            environment = {
                FOLDER_VARIABLE: str(folder),
                "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            # Of a session of its own: Ctrl-C reaches the launcher alone, which asks all ranks to end.
            processes.append(
                subprocess.Popen(
                    command, env=os.environ | environment, start_new_session=True, preexec_fn=end_with_launcher
                )
            )
        while len(codes) < ranks and not any(codes.values()):
            time.sleep(BETWEEN_LOOKS)
            codes |= _ended(processes, codes)
    except _Stopped as stopped:
        _end(processes, *stopped.args)
        raise
    by_force = _end(processes, signal.SIGTERM)
    # A rank that was killed may end after those that wait for it; one that ends as it was asked to has not failed.
    later = _ended(processes, codes)
    codes |= {rank: code for rank, code in later.items() if code != -signal.SIGTERM and rank not in by_force}
    return {rank: code for rank, code in codes.items() if code}


def _ended(processes: Sequence["subprocess.Popen[bytes]"], known: Mapping[int, int]) -> dict[int, int]:
    """The exit codes of ranks that have ended and are not known yet."""
    ended = {rank: process.poll() for rank, process in enumerate(processes) if rank not in known}
    return {rank: code for rank, code in ended.items() if code is not None}


def _end(processes: Sequence["subprocess.Popen[bytes]"], number: int) -> set[int]:
    """Ask the ranks that still run to end, then kill those that do not; the ranks killed."""
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in running:
        os.killpg(processes[rank].pid, number)
    deadline = time.monotonic() + PATIENCE
    by_force: set[int] = set()
    for rank in running:
        try:
            processes[rank].wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            by_force.add(rank)
            os.killpg(processes[rank].pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that waits for a device is not even killed
                processes[rank].wait(PATIENCE)
    return by_force


def tell_launcher(sentence: str) -> bool:
    """Hand the sentence that ends this rank to its launcher, which prints it once; False without `launch`.

    TORCHELASTIC_ERROR_FILE alone does not count: torchrun shows no sentence, and the variable may be left over.
    """
    file, folder = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get(FOLDER_VARIABLE)
    if not file or not folder or not Path(file).is_relative_to(folder):
        return False
    Path(file).write_text(json.dumps({"message": sentence}), encoding="utf-8")
    return True
