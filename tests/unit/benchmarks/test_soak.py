"""What the soak calls growth, on series that are made up."""

from collections.abc import Callable

import pytest
import soak
from soak import Look

STEPS = 2000


def judged(
    mib: Callable[[int], float] = lambda _: 600.0,
    files: Callable[[int], int] = lambda _: 20,
    seconds: Callable[[int], float] = lambda _: 0.05,
) -> list[str]:
    """The faults of a job of this size, these files and this CPU time at each step."""
    looks, cpu = [], 9.0
    for step in range(STEPS):
        cpu += seconds(step)
        looks.append(Look(mib(step), files(step), cpu))
    steps = [{"time/step": 0.1, "throughput/tokens_per_second": 1000.0}] * STEPS
    return soak.faults(soak.growth(soak.tenths(looks, steps)))


def shaken(step: int) -> float:
    """Between -1 and 1, without a trend."""
    return (step * 7919 % 1000) / 500 - 1


STEADY = {
    "nothing moves": {},
    "noise": {"mib": lambda step: 600 + 30 * shaken(step), "seconds": lambda step: 0.05 + 0.02 * shaken(step)},
    "warm-up": {
        "mib": lambda step: 600 + min(step, 190),
        "seconds": lambda step: 0.05 if step > 190 else 0.2,
        "files": lambda step: 20 + (step > 190),
    },
    "a neighbour in two tenths": {"seconds": lambda step: 0.09 if 1300 <= step < 1700 else 0.05},
    "a file that is open for a moment": {"files": lambda step: 21 if step % 10 == 0 else 20},
    "growth that is small": {"mib": lambda step: 600 + step * 10 / STEPS, "seconds": lambda step: 0.05 + step * 1e-6},
    "a job that shrinks": {"mib": lambda step: 600 - step / 10, "seconds": lambda step: 0.05 - step * 1e-5},
}
GROWING = {
    "a leak": ({"mib": lambda step: 600 + step * 20 / STEPS}, ["resident set"]),
    "a leak in the end": ({"mib": lambda step: 600 + (step > 1850) * 13}, ["resident set"]),
    "a file every hundred steps": ({"files": lambda step: 20 + step // 100}, ["open files"]),
    "one file that stays open": ({"files": lambda step: 20 + (step > 1500)}, ["open files"]),
    "steps that take longer": ({"seconds": lambda step: 0.05 + step * 2e-6}, ["CPU time a step"]),
    "everything": (
        {
            "mib": lambda step: 600 + step,
            "files": lambda step: step,
            "seconds": lambda step: 0.05 + step * 1e-4,
        },
        ["resident set", "CPU time a step", "open files"],
    ),
}


@pytest.mark.parametrize("series", STEADY)
def test_what_keeps_its_size_has_no_fault(series: str) -> None:
    assert judged(**STEADY[series]) == []


@pytest.mark.parametrize("series", GROWING)
def test_what_grows_is_named(series: str) -> None:
    given, expected = GROWING[series]
    assert judged(**given) == expected


def test_a_tenth_says_what_its_steps_took() -> None:
    """Twenty steps of 10 ms and then of 30 ms: the first look is where the first step has ended."""
    looks = [Look(100.0 + step, 5, 1 + 0.01 * min(step, 10) + 0.03 * max(step - 10, 0)) for step in range(21)]
    steps = [{"time/step": 0.5, "throughput/tokens_per_second": float(2 * step)} for step in range(21)]
    rows = soak.tenths(looks, steps)
    assert [row["steps"] for row in rows[:2]] == ["1 to 2", "3 to 4"]
    assert [row["cpu_ms_a_step"] for row in rows] == [10.0] * 5 + [30.0] * 5
    assert [row["tokens_a_step"] for row in rows[:2]] == [1.5, 3.5]
    assert rows[0]["resident_mib"] == 101.0 and rows[-1]["resident_mib"] == 119.0
