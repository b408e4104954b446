"""The mismatch of a run's first steps, before the policies of different arms have moved apart."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tailrl.analysis.runs import known_mean
from tailrl.artifacts.results import Results
from tailrl.stats.tests import Difference, difference_from
from tailrl.tracking.metrics import K3_UNMASKED

FIRST_STEPS = 10
"""Steps that count as a run's first."""


@dataclass(frozen=True, slots=True)
class FirstK3:
    """The mean k3 of the full policies over a run's first `FIRST_STEPS` steps, nats; NaN where no step has one."""

    arm: str
    seed: int
    k3: float


@dataclass(frozen=True, slots=True)
class K3Ratio:
    """`FirstK3` of arm `first` over that of arm `second`.

    Attributes:
        ratio, low, high: of geometric means over seeds, with the t interval in logarithms. Within a study the seeds are
            those of both arms, paired. A single seed has no interval.
        p: two-sided, that the ratio is 1.
        n: seeds.
    """

    first: str
    second: str
    ratio: float
    low: float
    high: float
    p: float
    n: int


def first_k3(results: Results) -> list[FirstK3]:
    """The number of each run, arm by arm."""
    return [FirstK3(run.arm, run.seed, known_mean(run.metric(K3_UNMASKED)[:FIRST_STEPS])) for run in results.all_runs()]


def k3_ratios(numbers: list[FirstK3]) -> Iterator[K3Ratio]:
    """Every pair of arms that have seeds in common with a k3 above 0 in both: the later over the earlier arm."""
    for (earlier, below), (later, above) in itertools.combinations(_logarithms(numbers).items(), 2):
        if seeds := sorted(below.keys() & above.keys()):
            yield _ratio(later, earlier, difference_from([above[seed] - below[seed] for seed in seeds], 0.0))


def _logarithms(numbers: list[FirstK3]) -> dict[str, dict[int, float]]:
    """By arm and seed, where there is a k3 above 0."""
    arms: dict[str, dict[int, float]] = {}
    for one in numbers:
        if one.k3 > 0:
            arms.setdefault(one.arm, {})[one.seed] = math.log(one.k3)
    return arms


def _ratio(first: str, second: str, logs: Difference) -> K3Ratio:
    ratio, low, high = (math.exp(end) for end in (logs.mean, logs.low, logs.high))
    return K3Ratio(first, second, ratio, low, high, logs.p, logs.n)
