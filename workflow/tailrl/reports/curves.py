"""The numbers behind the figures: computed here once, drawn by `figures`, written as CSV.

A table is a list of frozen records: one per CSV row, or for curves one per line of a figure.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import TrainedRun
from tailrl.artifacts.tables import Row
from tailrl.stats.intervals import cluster_interval
from tailrl.tracking.metrics import (
    PHASES,
    STEP,
    STEP_SECONDS,
    TIME,
    in_group,
)

SMOOTHING = 0.05
"""The window of a training curve's moving mean, as a share of the steps."""

NATS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, math.inf)
"""Edges of the bins of -ln π_train; finer near probability 1, where the bound on |Δ| goes to zero."""

BEHIND = {
    "evaluation": ("evaluation", "policies"),
    "distributions": ("distributions", "safe_sets", "probability", "signature", "histograms"),
    "pooled": ("comparisons", "measures"),
}
"""The tables behind a figure, if not just the one of its name."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one arm over the steps: mean, minimum and maximum over seeds.

    Attributes:
        step_N: int, 0-based; the union of the seeds' steps.
        mean_N, low_N, high_N: float64, NaN where no seed has a value.
        window: steps of the centred moving mean, applied to each seed first; 1 for none.
    """

    arm: str
    metric: str
    step_N: NDArray[np.int64]
    mean_N: FloatArray
    low_N: FloatArray
    high_N: FloatArray
    window: int

    def rows(self) -> Iterator[Row]:
        """One CSV row per step."""
        for step, mean, low, high in zip(self.step_N, self.mean_N, self.low_N, self.high_N, strict=True):
            named = {"arm": self.arm, "metric": self.metric, "step": int(step)}
            yield {**named, "mean": mean, "seed_min": low, "seed_max": high, "window": self.window}


def moving_mean(values_N: FloatArray, window: int) -> FloatArray:
    """The centred mean over `window` (odd) steps; shorter at the ends, without NaN entries."""
    known = ~np.isnan(values_N)
    kernel, half = np.ones(window), window // 2
    total = np.convolve(np.where(known, values_N, 0.0), kernel)[half : half + values_N.size]
    count = np.convolve(known.astype(np.float64), kernel)[half : half + values_N.size]
    with np.errstate(invalid="ignore"):
        return np.where(known, total / count, math.nan)


def window_of(runs: Sequence[TrainedRun]) -> int:
    """The odd number of steps nearest to SMOOTHING of the longest run, at least 1."""
    steps = max(len(run.metrics[STEP]) for run in runs)
    return 2 * int(SMOOTHING * steps / 2) + 1


def curve(runs: Sequence[TrainedRun], key: str, *, window: int = 1, lost: bool = False) -> Curve:
    """One metric of one arm's runs over the steps.

    Args:
        runs: one arm's runs, one per seed.
        key: the metric; NaN for a seed without it.
        window: odd number of steps of the moving mean.
        lost: take 1 minus the metric, such as the mass outside for a kept mass.
    """
    step_N = np.unique(np.concatenate([run.metric(STEP) for run in runs]))
    value_SN = np.full((len(runs), step_N.size), math.nan)
    for row, run in zip(value_SN, runs, strict=True):
        values = run.metric(key)
        row[np.searchsorted(step_N, run.metric(STEP))] = moving_mean(1.0 - values if lost else values, window)
    known_N = ~np.isnan(value_SN).all(axis=0)
    mean_N, low_N, high_N = np.full((3, step_N.size), math.nan)
    mean_N[known_N] = np.nanmean(value_SN[:, known_N], axis=0)
    low_N[known_N] = np.nanmin(value_SN[:, known_N], axis=0)
    high_N[known_N] = np.nanmax(value_SN[:, known_N], axis=0)
    return Curve(runs[0].arm, lacking(key) if lost else key, step_N.astype(np.int64), mean_N, low_N, high_N, window)


def lacking(key: str) -> str:
    """The name of 1 minus a metric."""
    return f"1 - {key}"


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
    train_T = np.concatenate([run.tokens.logp_train_T for run in runs])
    delta_T = train_T - np.concatenate([run.tokens.logp_infer_T for run in runs])
    # Tokens of one step share weights and prompts: each (seed, step) is one cluster.
    cluster_T = np.concatenate([(index << 32) + run.tokens.step_T.astype(np.int64) for index, run in enumerate(runs)])
    bin_T = np.digitize(-train_T, NATS) - 1
    # Rounding can make the log-probability of a near-certain token slightly positive.
    bin_T = np.where(np.isfinite(delta_T), np.maximum(bin_T, 0), -1)
    rest_T = np.maximum(-np.expm1(train_T), 0.0)
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


@dataclass(frozen=True, slots=True)
class TimeShare:
    """One phase's share of an arm's step time, and its seconds per step."""

    arm: str
    phase: str
    share: float
    seconds: float


def time_shares(runs: Sequence[TrainedRun]) -> list[TimeShare]:
    """Every phase of one arm over all steps and seeds; a phase that was never timed is part of `other`."""
    total_N = np.concatenate([run.metric(STEP_SECONDS) for run in runs])
    total, steps = float(np.nansum(total_N)), int((~np.isnan(total_N)).sum())
    if total == 0:
        return [TimeShare(runs[0].arm, phase, math.nan, math.nan) for phase in (*PHASES, "other")]
    phase_seconds = {
        phase: float(sum(np.nansum(run.metric(in_group(TIME, phase))) for run in runs)) for phase in PHASES
    }
    phase_seconds["other"] = max(0.0, total - sum(phase_seconds.values()))
    whole = sum(phase_seconds.values())
    return [TimeShare(runs[0].arm, phase, spent / whole, spent / steps) for phase, spent in phase_seconds.items()]


def mean_of(runs: Sequence[TrainedRun], key: str, *, last: float = 1.0) -> FloatArray:
    """Each seed's mean of a metric over the last share of its steps, at least one step: (S,), NaN if absent."""
    means = []
    for run in runs:
        values = run.metric(key)
        values = values[-max(1, math.ceil(last * values.size)) :]
        known = values[~np.isnan(values)]
        means.append(float(known.mean()) if known.size else math.nan)
    return np.array(means)
