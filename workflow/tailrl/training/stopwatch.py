"""The times of a step's phases, on a CPU or in a GPU's own order."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tailrl.runtime import distributed


@dataclass(slots=True)
class Stopwatch:
    """The times of a step's named phases.

    A GPU works on what the CPU asked of it earlier. There an event marks each start and end in the GPU's own order, and
    nothing waits for it before `read`.
    """

    phases: list[tuple[str, Any, Any]] = field(default_factory=list)  # name, start, end

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to the phase, time of other phases within it included."""
        start = _now()
        try:
            yield
        finally:
            self.phases.append((name, start, _now()))

    def read(self) -> dict[str, float]:
        """Seconds spent in each phase so far; waits for the GPU."""
        seconds: dict[str, float] = {}
        if self.phases and not isinstance(self.phases[-1][2], float):
            self.phases[-1][2].synchronize()
        for name, start, end in self.phases:
            spent = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
            seconds[name] = seconds.get(name, 0.0) + spent
        return seconds


def _now() -> Any:
    """The time in seconds, or an event on the GPU's stream."""
    if distributed.device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
