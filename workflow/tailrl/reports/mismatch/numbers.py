"""The mismatch of sampled tokens by their probability, and of a run's first steps."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.reports.curves import mean_of
from tailrl.stats.intervals import cluster_interval, known_mean
from tailrl.stats.tests import Difference, difference_from
from tailrl.tracking.metrics import K3_UNMASKED

NATS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, math.inf)
"""Edges of the bins of -ln π_train; finer near probability 1, where the bound on |Δ| goes to zero."""

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


def mean_k3(results: Results, arm: str) -> float:
    """An arm's mean unmasked k3 KL over all steps and seeds, nats; NaN if not recorded."""
    return known_mean(mean_of(results.runs[arm], K3_UNMASKED))


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


@dataclass(frozen=True, slots=True)
class DeltaBin:
    """Δ = log π_train - log π_infer of sampled tokens with -ln π_train in [nats_from, nats_to).

    Attributes:
        tokens: how many lie in the bin; clusters: how many steps of runs they come from.
        size, size_low, size_high: mean |Δ| with its interval over clusters, nats.
        signed, signed_low, signed_high: mean of -Δ with its interval over clusters, nats.
        epsilon: the smallest ε_max, nats, that allows the mean |Δ| in the exact worst case of Proposition 4.2,
            |Δ| ≤ ln(p + (1-p) e^{2ε}). It is equal in all bins if |Δ| grows with 1 - p like the worst case.
        sigma: σ, nats, of Proposition 4.3's noise ε_k ~ N(0, σ²); σ² = Σ Δ² / Σ (1-p) over all of the arm's tokens.
        size_normal_low, size_normal_high: the mean |Δ| predicted from this noise, √(2/π) σ (1-p) √(1+c), for c = 0 and
            c = 1. c is the probability that two draws from the other tokens agree.
        signed_paper: the mean of -Δ by Proposition 4.3 as printed, mean Δ².
        signed_corrected: the mean of -Δ to second order in σ, (3/2) mean Δ² - σ² (1-p).

    Only p_a is known of the states' distributions, a being the sampled token. Under this noise Δ² has the mean
    σ²[(1-p_a)² + Σ_{k≠a} p_k²], which the paper prints for -Δ. To second order the mean of -Δ is
    σ²[½ - 2p_a + (3/2) Σ_k p_k²], which is 3/2 of the former minus σ²(1-p_a). Over a state's sampled tokens Δ² has the
    mean σ²(1 - Σ_k p_k²), and 1-p has the mean 1 - Σ_k p_k². Under a mask this assumes that the sampler's set has all
    the mass.
    """

    arm: str
    nats_from: float
    nats_to: float
    tokens: int
    clusters: int
    size: float
    size_low: float
    size_high: float
    signed: float
    signed_low: float
    signed_high: float
    epsilon: float
    sigma: float
    size_normal_low: float
    size_normal_high: float
    signed_paper: float
    signed_corrected: float


def delta_bins(runs: Sequence[TrainedRun]) -> list[DeltaBin]:
    """The bins of one arm's tokens over all seeds, without tokens whose log-probability is not finite."""
    trainer_T = np.concatenate([run.tokens.logp_trainer_T for run in runs])
    delta_T = trainer_T - np.concatenate([run.tokens.logp_sampler_T for run in runs])
    # Tokens of one step share weights and prompts: each (seed, step) is one cluster.
    cluster_T = np.concatenate([(index << 32) + run.tokens.step_T.astype(np.int64) for index, run in enumerate(runs)])
    bin_T = np.digitize(-trainer_T, NATS) - 1
    # Rounding can make the log-probability of a near-certain token slightly positive.
    bin_T = np.where(np.isfinite(delta_T), np.maximum(bin_T, 0), -1)
    rest_T = np.maximum(-np.expm1(trainer_T), 0.0)
    rest = float(rest_T[bin_T >= 0].sum())
    sigma = math.sqrt(float(np.square(delta_T[bin_T >= 0]).sum()) / rest) if rest > 0 else math.nan
    bins = []
    for index, (low, high) in enumerate(itertools.pairwise(NATS)):
        delta, cluster = delta_T[bin_T == index], cluster_T[bin_T == index]
        size, signed = cluster_interval(np.abs(delta), cluster), cluster_interval(-delta, cluster)
        ends = (size.mean, size.low, size.high, signed.mean, signed.low, signed.high)
        predicted = _predicted(size.mean, np.square(delta), rest_T[bin_T == index], sigma)
        bins.append(DeltaBin(runs[0].arm, low, high, delta.size, size.n, *ends, *predicted))
    return bins


def _predicted(size: float, square_T: FloatArray, rest_T: FloatArray, sigma: float) -> tuple[float, ...]:
    """The last six fields of a DeltaBin, from its mean |Δ| and its tokens' Δ² and 1 - p; NaN without tokens."""
    if not square_T.size:
        return (math.nan, sigma, *[math.nan] * 4)
    square, rest = float(square_T.mean()), float(rest_T.mean())
    # ½ ln(1 + (e^size - 1) / (1-p)), in a form that does not overflow after a collapse.
    epsilon = (size + math.log1p((rest - 1) * math.expm1(-size) / rest)) / 2 if rest > 0 else math.nan
    normal = math.sqrt(2 / math.pi) * sigma * rest
    return epsilon, sigma, normal, math.sqrt(2) * normal, square, 1.5 * square - sigma**2 * rest
