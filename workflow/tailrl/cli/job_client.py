"""Hands a job of a study to a process that has imported torch and vLLM, and forks (`job_server`).

Snakemake on one machine without GPUs offers this in an environment variable. A server inherits everything from its
first client, such as environment, folder, limits and priority, and serves clients that are alike in all of it. On any
trouble before the fork, the job runs in its own process. Afterwards the two are one: signals are forwarded, a killed
client's job is killed, and the client ends as its job does.
"""

import fcntl
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tailrl.cli import OFFER
from tailrl.cli.job_title import PADDING, set_title

SERVED = ("train", "evaluate", "compare")
"""The jobs that import torch and of which a study has several."""
BEFORE = "policy"
"""The job that they wait for, on one core: meanwhile a server imports."""
UNUSED = "sklearn"
"""transformers imports it, with SciPy and pandas, for assisted generation, which no job does: 0.9 CPU seconds."""
OF_A_SHELL = ("_", "SHLVL", "OLDPWD")
"""Variables that differ from shell to shell, and that no job reads."""
MEMORY_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
TAKEN = b"+"
"""A server's answer when the job has been forked. What follows is the job's exit code."""
TRIES, BETWEEN_TRIES = 1000, 0.01
"""To reach a server that another client is starting, and seconds between them."""
PATIENCE = 180.0
"""Seconds that a client waits for a server, which may have to import first. Then it runs its job itself."""


def ask() -> None:
    """Ends this process as its job ends, if a server takes the job; else returns, and the job is to run here."""
    if OFFER not in os.environ or not _is_served(sys.argv[1:]):
        return
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    try:
        for number in (0, 1, 2):  # one that is closed would be the socket
            os.fstat(number)
        *_, folder = os.environ[OFFER].split(maxsplit=2)
        server = _connected(Path(folder, _likeness()))
        if sys.argv[2] == BEFORE:
            return
        server.settimeout(PATIENCE)
        request = {"argv": sys.argv, "path": sys.path}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        if server.recv(1) != TAKEN:
            return
        server.settimeout(None)
        server.send(TAKEN)
    except OSError:
        return
    finally:
        signal.signal(signal.SIGINT, interrupted)
    _end_like(_awaited(server))


def _is_served(words: list[str]) -> bool:
    """Whether a fork would do for this command: not where its memory is limited."""
    limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in MEMORY_LIMITS)
    served = [[name] for name in (*SERVED, BEFORE)]
    return words[:1] == ["job"] and words[1:2] in served and not limited


def _likeness() -> str:
    """A digest of what a server inherits and of the files it imports: equal for clients that may share a server."""
    mask = os.umask(0)
    os.umask(mask)
    alike = [
        {name: value for name, value in os.environ.items() if name not in OF_A_SHELL},
        [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        [signal.getsignal(number) == signal.SIG_IGN for number in FORWARDED],
        [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)), mask],
        # A container may share the temporary directory.
        [str(namespace.readlink()) for namespace in sorted(Path("/proc/self/ns").iterdir())],
        Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        [str(Path.cwd()), sys.executable],
        [str(version) for folder in sys.path for version in sorted(Path(folder).glob("*.dist-info"))],
        [(str(file), file.stat().st_mtime_ns) for file in sorted(Path(__file__).parents[1].rglob("*.py"))],
    ]
    # A socket's path holds 107 bytes.
    return hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:32]


def _connected(address: Path) -> socket.socket:
    """A connection to the server of this address, which is started where there is none; raises OSError."""
    with address.with_name("starting").open("w") as lock:
        for _ in range(TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(BETWEEN_TRIES)
        else:
            raise TimeoutError
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            _serve(address)
            server.connect(str(address))
        return server


def _serve(address: Path) -> None:
    """Starts a server, to which clients can connect at once; raises OSError."""
    address.unlink(missing_ok=True)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen(socket.SOMAXCONN)
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tailrl.cli.job_server", *os.environ[OFFER].split(maxsplit=2), PADDING],
            stdin=listener.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _awaited(server: socket.socket) -> int:
    """The exit code of the job, negative for a signal; as if it had been killed where its guardian was."""

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(OSError):
            server.send(bytes([signal.SIGSTOP if number == signal.SIGTSTP else number]))
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    # What looks for jobs by their commands finds the job alone.
    set_title([sys.executable, "tailrl-client"])
    try:
        return int(server.recv(16) or -signal.SIGKILL)
    except OSError:
        return -signal.SIGKILL


def _end_like(code: int) -> NoReturn:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)
