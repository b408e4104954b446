"""The times of a step's phases, on a CPU and on a GPU whose events are replaced."""

import time

import pytest
import torch

from tailrl.runtime import distributed
from tailrl.training.stopwatch import Stopwatch


class Stream:
    """A GPU that takes its own time over the work it was given, as the CPU runs ahead."""

    def __init__(self) -> None:
        self.milliseconds, self.waits = 0.0, 0


STREAM = Stream()


class FakeEvent:
    """`torch.cuda.Event` on STREAM."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "an event without timing has no time"
        self.at = -1.0

    def record(self) -> None:
        self.at = STREAM.milliseconds

    def synchronize(self) -> None:
        STREAM.waits += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert STREAM.waits, "an event that may lie ahead has no time yet"
        return end.at - self.at


def test_a_gpus_phases_have_its_own_times_and_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the phases wait for the GPU"))
    watch = Stopwatch()
    for spent in (3000.0, 500.0):
        with watch.phase("forward"):
            STREAM.milliseconds += spent
        with watch.phase("backward"):
            STREAM.milliseconds += 2 * spent
    assert STREAM.waits == 0
    assert watch.read() == {"forward": 3.5, "backward": 7.0}
    assert STREAM.waits == 1


def test_a_cpus_phases_have_the_clocks_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 10.0, 10.5, 11.0, 13.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watch.phase("forward"):
        pass
    with pytest.raises(ZeroDivisionError), watch.phase("forward"):
        raise ZeroDivisionError
    with watch.phase("metrics"):
        pass
    assert watch.read() == {"forward": 1.5, "metrics": 2.0}
    assert Stopwatch().read() == {}
