"""The mismatch of a run's first steps, before the policies of different arms have moved apart."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tailrl.artifacts.results import Results
from tailrl.stats.tests import difference_from
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
        ratio, low, high: of geometric means over the seeds that both arms have, with the t interval of the paired log
            ratios; no interval from a single seed, or where all ratios agree.
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
    found = []
    for run in results.all_runs():
        value_N = run.metric(K3_UNMASKED)[:FIRST_STEPS]
        known_N = value_N[~np.isnan(value_N)]
        found.append(FirstK3(run.arm, run.seed, float(known_N.mean()) if known_N.size else math.nan))
    return found


def k3_ratios(numbers: list[FirstK3]) -> Iterator[K3Ratio]:
    """Every pair of arms that have seeds in common with a k3 above 0 in both: the later over the earlier arm."""
    arms: dict[str, dict[int, float]] = {}
    for one in numbers:
        if one.k3 > 0:
            arms.setdefault(one.arm, {})[one.seed] = math.log(one.k3)
    for (earlier, below), (later, above) in itertools.combinations(arms.items(), 2):
        if seeds := sorted(below.keys() & above.keys()):
            found = difference_from([above[seed] - below[seed] for seed in seeds], 0.0)
            ratio, low, high = (math.exp(end) for end in (found.mean, found.low, found.high))
            yield K3Ratio(later, earlier, ratio, low, high, found.p, found.n)
