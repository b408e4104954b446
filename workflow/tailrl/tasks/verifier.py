"""Answers that are not integers: math-verify, in a process of its own that can be killed.

math-verify calls sympy, which a short answer can keep busy for hours. Its own time limit is SIGALRM: that interrupts no
long step in C, and works in the main thread only. So `MathVerifier` sends pairs to a worker, one JSON line each, and
kills a worker that is late. The worker is a script, not a `multiprocessing` child. It inherits no state of torch or
vLLM, imports nothing of the caller's main module, and gets no credentials.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tailrl.runtime.errors import ConfigurationError

MAX_LENGTH = 2000
"""Longest answer that is compared, characters. Two of them, escaped, fit in a pipe: a write cannot block."""

START_SECONDS = 120.0
"""Importing sympy takes half a second, and much longer on a network file system that is busy."""

_WORKER = Path(__file__).with_name("math_verify_worker.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


class MathVerifier:
    """Compares answers in a worker process, which starts at the first pair. For one thread at a time."""

    def __init__(self, timeout: float = 5.0, memory_bytes: int = 2 << 30) -> None:
        """Set the worker's limits: wall-clock seconds for one pair, and its address space (RLIMIT_AS)."""
        self.timeouts = 0  # pairs that took longer than the limit
        self.crashes = 0  # pairs during which the worker died
        self.unparsed = 0  # pairs that math-verify could not read, or longer than MAX_LENGTH
        self._timeout = timeout
        self._memory_bytes = memory_bytes
        self._worker: subprocess.Popen[bytes] | None = None

    def equal(self, response_answer: str, gold: str) -> bool:
        """Whether math-verify takes two LaTeX answers for the same; False where it cannot tell.

        Raises StudyError where the worker cannot start.
        """
        if max(len(response_answer), len(gold)) > MAX_LENGTH:
            self.unparsed += 1
            return False
        try:
            worker = self._running()
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([gold, response_answer]).encode("ascii") + b"\n")
            reply = reply_of(worker, self._timeout)
        except BaseException as error:
            # Also when the caller is interrupted: a worker that still owes a reply would give it to the next pair.
            self.close()
            if isinstance(error, TimeoutError):
                self.timeouts += 1
            elif isinstance(error, EOFError | BrokenPipeError):
                self.crashes += 1
            else:
                raise
            return False
        self.unparsed += reply == "unparsed"
        return reply == "equal"

    def close(self) -> None:
        """Kill the worker, if there is one; the next pair starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        """The worker, started anew where there is none or where it died between two pairs."""
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self.close()
        # -P: not to find our own modules beside the script in place of packages of the same name.
        command = [sys.executable, "-P", str(_WORKER), str(self._memory_bytes), str(self._timeout)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._worker = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Sets of symbols are ordered by hash: a fixed seed gives an answer the same reward in every run.
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        try:
            reply = reply_of(self._worker, START_SECONDS)
        except EOFError:
            reply = "it died at once"
        except TimeoutError:
            reply = f"it was not ready after {START_SECONDS:.0f} s"
        if reply != "ready":
            raise ConfigurationError(f"math-verify's worker process cannot start: {reply}")
        return self._worker


def reply_of(worker: subprocess.Popen[bytes], timeout: float) -> str:
    """The worker's next line; raises TimeoutError after `timeout` seconds, EOFError where the worker died."""
    assert worker.stdout is not None
    deadline = time.monotonic() + timeout
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([worker.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(worker.stdout.fileno(), 1)  # the next line may follow at once
        if not piece:
            raise EOFError
        line += piece
    return str(json.loads(line))
