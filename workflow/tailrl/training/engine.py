"""The rollout engine under guard: one that fails is started anew once, one that hangs ends the job.

Every response has a seed of its own, so that a step which is repeated on a new engine gives the same responses.
"""

import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from tailrl import ranks
from tailrl.errors import StudyError
from tailrl.records import Request, Rollout
from tailrl.rollout import Decoding, Sampler
from tailrl.settings import Disturbance
from tailrl.training.handover import Handover

STDERR = 2
GRACE = 10.0
"""Seconds after the deadline until the process is ended from outside the interpreter."""


class Engine:
    """A sampler, how to make it, and the weights' way to it."""

    def __init__(self, make: Callable[[], Sampler], disturbance: Disturbance, timeout: float) -> None:
        """Args:
        make: starts the engine.
        disturbance: of the weights that are handed over.
        timeout: seconds after which a batch counts as hung.
        """
        self.make = make
        self.sampler = make()
        self.hand_over = Handover(self.sampler, disturbance)
        self.timeout = timeout

    def generate(self, requests: Sequence[Request], decoding: Decoding, model: PreTrainedModel) -> list[Rollout]:
        """`Sampler.generate`, on a new engine with the same weights where the first one fails.

        One rank of several cannot be handed weights alone: its process ends where its engine fails, with a code by
        which the rule knows that another one may succeed.

        Raises:
            StudyError: bad input, or the new engine fails too; then with the last lines of the error.
        """
        try:
            return self._generate(requests, decoding)
        except StudyError:
            raise
        except Exception as error:
            first = _last_lines(error)
        if ranks.count() > 1:
            print(f"tailrl: the engine of rank {ranks.number()} failed: {first}", file=sys.stderr, flush=True)
            os._exit(os.EX_SOFTWARE)
        print(f"tailrl: the engine failed and is started anew, the batch repeated: {first}", file=sys.stderr)
        try:
            del self.sampler, self.hand_over.sampler
            gc.collect()  # before the new engine asks for the memory of the old one
            self.sampler = self.hand_over.sampler = self.make()
            self.hand_over.again(model)
            return self._generate(requests, decoding)
        except StudyError as error:
            raise StudyError(f"the engine failed ({first}) and could not be started anew: {error}") from None
        except Exception as error:
            raise StudyError(f"the engine failed twice in the same batch: {_last_lines(error)}") from error

    def _generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        with deadline(self.timeout, f"a batch of {len(requests)} responses"):
            return self.sampler.generate(requests, decoding)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends the process, with a sentence and every thread's stack on stderr, where the block takes longer.

    Nothing gentler helps: an engine in this process that hangs cannot be told to stop. The process ends with a code
    that is not 1, by which the rule knows that another one may succeed: `os.EX_SOFTWARE`, or by SIGALRM.
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


def _last_lines(error: Exception, count: int = 3) -> str:
    """The end of what the engine said, on one line."""
    lines = "".join(traceback.format_exception_only(error)).split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-count:])
