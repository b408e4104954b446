"""An end, in time, for a process whose rollout engine hangs."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
GRACE = 10.0
"""Seconds after the deadline until the process is ended from outside the interpreter."""


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends the process, with a sentence and every thread's stack on stderr, where the block takes longer.

    One at a time: there is one timer for what holds the interpreter's lock. Nothing gentler helps, since an engine in
    this process that hangs cannot be told to stop. The process ends with a code that is not 1, by which the rule knows
    that another one may succeed: `os.EX_SOFTWARE`, or by SIGALRM.
    """

    def end() -> None:
        print(f"tailrl: {what} took longer than {seconds:g} s: the engine hangs", file=sys.stderr, flush=True)
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
