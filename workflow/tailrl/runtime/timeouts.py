"""Calls of a rollout engine under guard: one that hangs ends the process, one that fails has its name."""

import atexit
import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tailrl.runtime.errors import StudyError, say

STDERR = 2
GRACE = 10.0
"""Seconds after the deadline until the process is ended from outside the interpreter."""
MONTH = 30 * 86400.0
"""The longest time that a study may give a call: about what the system's timers take."""
ENDING = 600
"""Seconds that a process may take for its end, an engine's included."""


class EngineError(Exception):
    """An engine failed: nothing in the study is wrong, and another process may succeed.

    The command line ends with `os.EX_SOFTWARE`, by which the rule knows that.
    """


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends the process, with a sentence and every thread's stack on stderr, where the block takes longer.

    One at a time: there is one timer for what holds the interpreter's lock. Nothing gentler helps, since an engine in
    this process that hangs cannot be told to stop. The process ends with a code that is not 1, by which the rule knows
    that another one may succeed: `os.EX_SOFTWARE`, or by SIGALRM.
    """

    def end() -> None:
        say(f"{what} took longer than {seconds:g} s: the engine hangs")
        faulthandler.dump_traceback(STDERR)
        os._exit(os.EX_SOFTWARE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # Where the engine holds the interpreter's lock, no thread of Python's runs; these two need none.
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
    """`deadline` around a call of an engine, of which any error that is none of ours is an EngineError.

    Args:
        seconds: that the call may take.
        what: is called, in the words of a sentence.

    Raises:
        EngineError: with the last lines of the error.
    """
    with deadline(seconds, what):
        try:
            yield
        except StudyError:
            raise
        except Exception as error:
            raise EngineError(f"{what} failed: {last_lines(error)}") from error


def last_lines(error: Exception, count: int = 3) -> str:
    """The end of what the engine said, on one line."""
    lines = "".join(traceback.format_exception_only(error)).split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-count:])


def limit_the_end() -> None:
    """Ends this process by SIGALRM where its interpreter takes longer than ENDING to end."""
    # What was registered last runs first: before the exits of libraries, which may hang.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, ENDING)
