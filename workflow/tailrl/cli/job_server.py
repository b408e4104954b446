"""Imports torch, and vLLM, for the jobs of a study, and forks for each (`job_client`). It ends with its Snakemake.

It keeps no module of this package: a job imports the files as they are then. It forks only while it has one thread, as
threads and their locks do not survive a fork. Between server and job there is a guardian, which kills the job when the
client is gone. The job ends with its guardian, but not with the server.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, cast

from tailrl.cli.job_client import TAKEN, UNUSED
from tailrl.cli.job_title import set_title
from tailrl.runtime.imports import without

MODULES = {
    "torch": ("transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe", "typer"),
    # The first one sets variables that vLLM reads.
    "vllm": (
        *("tailrl.rollout.vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
        *("vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.llama"),
    ),
}
"""Not lm-eval's: pyarrow starts a thread."""
REQUEST_BYTES = 1 << 18
"""Bytes of a request: more than a socket takes."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves at the socket that is the standard input, until the process of the first argument ends.

    The second argument names the libraries, the third the folder of the socket, which only this user can enter. It also
    returns in the process of each job, which then is as one that was started with the job's command.
    """
    snakemake = os.pidfd_open(int(sys.argv[1]))
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    set_title([sys.executable, "tailrl-server"])
    import_all(sys.argv[2].split(","))
    guardians: dict[tuple[str, ...], int] = {}
    silent: list[socket.socket] = []
    while True:
        files = [listener.fileno(), snakemake, *(connection.fileno() for connection in silent)]
        ready, _, _ = select.select(files, [], [])
        if snakemake in ready:
            break
        if listener.fileno() in ready:
            silent.append(listener.accept()[0])
        guardians = {words: process for words, process in guardians.items() if os.waitpid(process, os.WNOHANG)[0] == 0}
        for connection in [connection for connection in silent if connection.fileno() in ready]:
            silent.remove(connection)
            with connection:
                request, standard_files = _received(connection)
                words = tuple(request.get("argv", ()))
                if words and len(list(Path("/proc/self/task").iterdir())) == 1:
                    earlier = guardians.get(words)
                    guardians[words] = os.fork()
                    if guardians[words] == 0:
                        # Clients would wait at them, were the server gone.
                        for inherited in (listener, *silent):
                            inherited.close()
                        os.close(snakemake)
                        _guard(connection, earlier)
                        _become(request, standard_files)
                        return
                for file in standard_files:
                    os.close(file)
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    sys.exit()


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A client's request, which is there, and its standard files; an empty request from a client that is gone."""
    try:
        text, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    except OSError:
        return {}, []
    try:
        return json.loads(text), files
    except ValueError:  # gone, or cut off
        return {}, files


def import_all(libraries: Sequence[str]) -> None:
    """Imports what jobs with these libraries import."""
    with without(UNUSED):
        for name in (name for library in libraries for name in MODULES[library]):
            importlib.import_module(name)
    # What is here stays: no job's collector goes through it.
    gc.collect()
    gc.freeze()


def _guard(connection: socket.socket, earlier: int | None) -> None:
    """Forks, and returns in the fork, the job; this process tells the client of the job's end, and then ends.

    Args:
        connection: to the client, which may have given up: only its answer starts the job. Its end kills the job. A
            byte from it is a signal for the job.
        earlier: the guardian of a job with the same command: of a killed client, so that it soon ends.
    """
    if earlier is not None:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(earlier)], [], [])
    if not _is_wanted(connection):
        os._exit(0)
    guardian = os.getpid()
    if (job := os.fork()) == 0:
        connection.close()
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        return
    set_title([sys.executable, "tailrl-guardian"])
    ended = os.pidfd_open(job)
    with suppress(ConnectionError):
        while ended not in select.select([connection.fileno(), ended], [], [])[0] and (number := connection.recv(1)):
            os.kill(job, number[0])
    os.kill(job, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    with suppress(ConnectionError):
        connection.send(str(code).encode())
    os._exit(0)


def _is_wanted(connection: socket.socket) -> bool:
    """Whether the client still waits for its job; if not, it runs the job itself."""
    try:
        connection.send(TAKEN)
        return connection.recv(1) == TAKEN
    except ConnectionError:
        return False


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Makes this process one that was started with the client's command, path and standard files."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=sys.stdout.isatty())
    sys.argv, sys.path[:] = request["argv"], request["path"]
    sys.orig_argv = [sys.executable, *sys.argv]
    set_title(sys.orig_argv)
    # As of a script: so are the children of multiprocessing started, and so does W&B name the program.
    sys.modules["__main__"].__dict__.update(__file__=sys.argv[0], __spec__=None)
    # Each process has another seed. Python's own generator sees to it by itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tailrl"]:
        del sys.modules[name]
    # Else nanobind says at the end that its types leak.
    atexit.register(gc.unfreeze)


def _end_at_once() -> NoReturn:
    """Ends this process as Python does, but takes no library apart: that would take 2 CPU seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    from tailrl.cli.command_line import run

    run()
    _end_at_once()
