"""Guards calls of a rollout engine: a hung call ends the process, a failed call raises EngineError."""

import atexit
import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tailrl.runtime.errors import StudyError, masked, say

STDERR = 2
GRACE = 10.0
"""Seconds from the deadline to the stacks written without the interpreter; after another half of it, SIGALRM."""
MONTH = 30 * 86400.0
"""Seconds; the longest timeout in a study, about the limit of the system's timers."""
ENDING = 600
"""Seconds that a process, or an engine in it, may take to end."""


class EngineError(Exception):
    """An engine failed: the study is not at fault, and a new process may succeed.

    The command line then ends with `os.EX_SOFTWARE`, which tells the rule to try again.
    """


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends the process if the block takes longer, with a sentence and every thread's stack on stderr.

    A hung engine in this process cannot be stopped otherwise. The process ends with `os.EX_SOFTWARE` or by SIGALRM,
    which tells the rule to try again. Deadlines do not nest: SIGALRM has one timer.
    """

    def end() -> None:
        say(f"{what} took longer than {seconds:g} s: the engine hangs")
        faulthandler.dump_traceback(STDERR)
        os._exit(os.EX_SOFTWARE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # An engine that holds the interpreter's lock stops every Python thread; these two need none.
    faulthandler.dump_traceback_later(seconds + GRACE, file=STDERR)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1.5 * GRACE)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def guarded(seconds: float, what: str) -> Iterator[None]:
    """`deadline` around a call of an engine; `what` names the call in sentences.

    Raises:
        EngineError: the call raised anything but a StudyError; with the last lines of the error.
    """
    with deadline(seconds, what):
        try:
            yield
        except StudyError:
            raise
        except Exception as error:
            raise EngineError(f"{what} failed: {last_lines(error)}") from error


def last_lines(error: Exception) -> str:
    """The last three lines of the error, on one line."""
    lines = masked("".join(traceback.format_exception_only(error))).split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-3:])


def limit_the_end() -> None:
    """Ends this process by SIGALRM if its interpreter takes longer than ENDING to end; Windows has no such timer."""
    if not hasattr(signal, "setitimer"):
        return
    # The last handler registered runs first: before the exits of libraries, which may hang.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, ENDING)
