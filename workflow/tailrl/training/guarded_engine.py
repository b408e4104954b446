"""The rollout engine under guard: an engine that fails is restarted once; one that hangs ends the job.

Every response has its own seed, so a step repeated on a new engine gives the same responses.
"""

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from tailrl.config.sampler import Disturbance
from tailrl.rollout import Decoding, Sampler
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError, StudyError, say
from tailrl.runtime.timeouts import deadline, guarded, last_lines
from tailrl.training.placement import is_sharded
from tailrl.training.weight_sync import WeightSync

RETESTED = 4
"""Requests of a restarted engine's self-test."""


class GuardedEngine:
    """A sampler, how to make it, and how it gets weights."""

    def __init__(self, make: Callable[[], Sampler], disturbance: Disturbance, timeout: float) -> None:
        """Start the engine with `make`; `disturbance` is of the weights that it gets."""
        self.make = make
        self.timeout = (
            timeout  # seconds after which a call counts as hung: the start, a hand-over, a self-test, a batch
        )
        with self.in_time("the engine's start"):
            self.sampler = make()
        self.weight_sync = WeightSync(self.sampler, disturbance)

    def in_time(self, what: str) -> AbstractContextManager[None]:
        """For a block that calls the engine; see `timeouts.guarded`."""
        return guarded(self.timeout, what)

    def generate(self, requests: Sequence[Request], decoding: Decoding, model: PreTrainedModel) -> list[Rollout]:
        """`Sampler.generate`, repeated on a new engine with the same weights where the first one fails.

        With a sharded policy the process ends instead, with a code that tells the rule that another process may
        succeed: one rank cannot get weights alone, and vLLM's end takes the ranks' process group with it.

        Raises:
            StudyError: bad input, or the new engine fails too; then with the last lines of the error.
        """
        try:
            return self._generate(requests, decoding)
        except StudyError:
            raise
        except Exception as error:
            first = last_lines(error)
        if is_sharded(model):
            say(f"rank {distributed.number()}: the engine failed: {first}")
            os._exit(os.EX_SOFTWARE)
        say(f"the engine failed and is restarted, its batch repeated: {first}")
        try:
            with deadline(self.timeout, "the end of the engine that failed"):
                del self.sampler, self.weight_sync.sampler
                gc.collect()  # frees the old engine's memory for the new one
            with deadline(self.timeout, "the engine's start"):
                self.sampler = self.weight_sync.sampler = self.make()
            with deadline(self.timeout, "the hand-over of the weights"):
                self.weight_sync.again(model)
            if requests:
                with deadline(self.timeout, "the engine's self-test"):
                    self.sampler.self_test(requests[:RETESTED], decoding)
                # Drops what the engine cached in its test.
                with deadline(self.timeout, "the hand-over of the weights"):
                    self.weight_sync.again(model)
            return self._generate(requests, decoding)
        except StudyError as error:
            raise ModelError(f"the engine failed ({first}) and could not be restarted: {error}") from None
        except Exception as error:
            raise ModelError(f"the engine failed twice in the same batch: {last_lines(error)}") from error

    def _generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        with deadline(self.timeout, f"a batch of {len(requests)} responses"):
            return self.sampler.generate(requests, decoding)
