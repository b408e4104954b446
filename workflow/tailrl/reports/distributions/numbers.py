"""Engines' whole distributions compared with the trainer's, as tables of numbers.

Positions are of tokens in their responses. Intervals are clustered by problem.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.probes import DistributionsRecord, read_positions
from tailrl.artifacts.records import read_record
from tailrl.config.distributions import Distributions
from tailrl.config.words import describe_disturbance, describe_sampler, sampler_settings
from tailrl.stats.intervals import Interval, cluster_interval, ratio_interval, share_interval


@dataclass(frozen=True, slots=True)
class Compared:
    """One engine's comparison: the engine's name in the study, the job's record, and arrays over P positions."""

    engine: str
    record: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    @property
    def settings(self) -> Distributions:
        """The job's settings."""
        return Distributions.model_validate(self.record["settings"])

    @property
    def clusters(self) -> NDArray[Any]:
        """The problem of each position, (P,): the clusters of every interval."""
        return self.arrays["problem_P"]

    @property
    def words(self) -> str:
        """The engine in words."""
        engine, rescored = self.settings.engine, self.settings.engine.rescored
        trainer = "the trainer in bfloat16" if self.settings.dtype == "bfloat16" else ""
        sampled = describe_sampler(engine.sampler)
        if rescored is not None:
            packed = "alone" if rescored == 1 else f"in at most {rescored} tokens"
            return f"{trainer or 'the trainer'} itself, responses packed {packed}; sampled by {sampled}"
        clauses = [sampled, *describe_disturbance(engine.disturbance), *filter(None, [trainer])]
        return "; ".join(clauses + sampler_settings(engine.sampler))


@dataclass(frozen=True, slots=True)
class Distance:
    """One engine's distance from the trainer over all positions; in nats, except for shares of 1.

    Attributes:
        equal: positions at which the two distributions agree to the bit.
        tv, tv_p01, tv_p99: total variation: mean with interval, 1st and 99th percentile.
        kl_train_infer, kl_infer_train: the two KL divergences.
        delta, delta_p99: |Δ| of the sampled token.
        delta_max: mean over positions of the largest |Δ| of any token; half_range: mean of Prop. 4.2's ε_max.
        flips, flip_share: positions at which greedy decoding differs, and their share with Wilson's interval.
    """

    engine: str
    what: str
    responses: int
    positions: int
    equal: int
    tv: Interval
    tv_p01: float
    tv_p99: float
    kl_train_infer: Interval
    kl_train_infer_p99: float
    kl_infer_train: Interval
    kl_infer_train_p99: float
    delta: Interval
    delta_p99: float
    delta_max: float
    delta_max_p99: float
    half_range: float
    entropy: float
    flips: int
    flip_share: Interval


@dataclass(frozen=True, slots=True)
class SetOverlap:
    """The min-p sets of the trainer and of one engine at one ρ, over all positions.

    Attributes:
        kept_train, kept_infer: mean |V_S| and |V'_S|; lost_train: mean 1 − Z in the trainer.
        outside: probability that the engine samples a token outside the trainer's set.
        k3: expected k3 of a token sampled from the engine's set, nats; tokens outside the trainer's set count as 0.
        overlap, overlap_p01, overlap_p99, overlap_least: |V_S ∩ V'_S| / |V_S|: mean, 1st and 99th percentile, smallest.
        different: positions at which the sets differ; responses_different: responses with such a position.
    """

    engine: str
    rho: str
    positions: int
    kept_train: float
    kept_infer: float
    lost_train: float
    outside: Interval
    k3: Interval
    overlap: Interval
    overlap_p01: float
    overlap_p99: float
    overlap_least: float
    different: int
    responses_different: int


@dataclass(frozen=True, slots=True)
class ProbabilityBin:
    """Tokens with −ln π_train in [nats_from, nats_to), weighted with the engine's probability.

    Attributes:
        mass: the expected number of such tokens that the engine samples at these positions.
        size, signed: their mean |Δ| and mean −Δ, nats.
        balance: signed / size, from −1 to 1; 1 if the engine overestimates all of them.
        paper, second: the mode of −Δ predicted from iid noise in the logits, nats: by arXiv 2512.23087, Prop. 4.3, and
            to second order.
    """

    engine: str
    nats_from: float
    nats_to: float
    mass: float
    size: Interval
    signed: Interval
    balance: Interval
    paper: Interval
    second: Interval


@dataclass(frozen=True, slots=True)
class Signature(ProbabilityBin):
    """The row of the head, of the tail, or of the tokens between.

    Attributes:
        part: head, between or tail.
        signed_eps_max, paper_eps_max: means of −Δ / ε_max and of Prop. 4.3's mode / ε_max, with each position's own
            ε_max, as in the histograms. NaN if no position has a mismatch.
    """

    part: str
    signed_eps_max: Interval
    paper_eps_max: Interval


@dataclass(frozen=True, slots=True)
class HistogramBin:
    """Tokens with −Δ / ε_max in [eps_max_from, eps_max_to), weighted with the engine's probability.

    Positions without a mismatch are left out.

    Attributes:
        part: head or tail.
        share: of the part's tokens that the engine samples; density: share / width of the bin.
    """

    engine: str
    part: str
    eps_max_from: float
    eps_max_to: float
    share: float
    density: float


def read_compared(folder: Path, engine: str) -> Compared:
    """One engine's comparison in a folder; raises StudyError if a file is missing or cannot be used."""
    record = read_record(folder, DistributionsRecord)
    return Compared(engine, record.model_dump(), read_positions(folder, record.compared.engine.sampler.says_routes))


def distance(compared: Compared) -> Distance:
    """The row of one engine."""
    a, clusters = compared.arrays, compared.clusters
    delta_P = np.abs(a["logp_train_P"] - a["logp_infer_P"])

    def mean(values_P: NDArray[Any]) -> tuple[Interval, float]:
        return cluster_interval(values_P, clusters), float(np.quantile(values_P, 0.99))

    return Distance(
        compared.engine,
        compared.words,
        len(np.unique(a["response_P"])),
        len(clusters),
        int((a["delta_max_P"] == 0).sum()),
        cluster_interval(a["tv_P"], clusters),
        *_percentiles(a["tv_P"]),
        *mean(a["kl_train_infer_P"]),
        *mean(a["kl_infer_train_P"]),
        *mean(delta_P),
        float(a["delta_max_P"].mean()),
        float(np.quantile(a["delta_max_P"], 0.99)),
        float(a["half_range_P"].mean()),
        float(a["entropy_train_P"].mean()),
        int(a["flip_P"].sum()),
        share_interval(int(a["flip_P"].sum()), len(clusters)),
    )


def set_overlaps(compared: Compared) -> list[SetOverlap]:
    """The rows of one engine, one for each ρ."""
    a, rows = compared.arrays, []
    for index, rho in enumerate(compared.settings.rho):
        train_P, infer_P, both_P = (a[f"kept_{name}_PS"][:, index] for name in ("train", "infer", "both"))
        overlap_P, differs_P = both_P / train_P, (both_P < train_P) | (both_P < infer_P)
        rows.append(
            SetOverlap(
                compared.engine,
                rho,
                len(train_P),
                float(train_P.mean()),
                float(infer_P.mean()),
                0.0 - float(np.expm1(a["log_kept_train_PS"][:, index]).mean()),
                cluster_interval(a["outside_PS"][:, index], compared.clusters),
                cluster_interval(a["k3_PS"][:, index], compared.clusters),
                cluster_interval(overlap_P, compared.clusters),
                *_percentiles(overlap_P),
                float(overlap_P.min()),
                int(differs_P.sum()),
                len(np.unique(a["response_P"][differs_P])),
            )
        )
    return rows


def probability_bins(compared: Compared) -> list[ProbabilityBin]:
    """The rows of one engine, one for each bin of token probability."""
    edges = [*compared.record["edges"], math.inf]
    return [ProbabilityBin(**_over_bins(compared, low, high)) for low, high in itertools.pairwise(edges)]


def signature(compared: Compared) -> list[Signature]:
    """The rows of one engine: head, between and tail."""
    edges = 0.0, compared.record["head_below"], compared.record["tail_from"], math.inf
    return [
        Signature(**_over_bins(compared, low, high), part=part, **_over_eps_max(compared, low, high))
        for part, (low, high) in zip(("head", "between", "tail"), itertools.pairwise(edges), strict=True)
    ]


def histograms(compared: Compared) -> list[HistogramBin]:
    """The rows of one engine's head and tail, bin by bin; a part without any mismatch has none."""
    rows = []
    for part in ("head", "tail"):
        mass_H = compared.arrays[f"{part}_PH"].sum(axis=0)
        if not mass_H.any():
            continue
        share_H, edges = mass_H / mass_H.sum(), np.linspace(-2, 2, len(mass_H) + 1).tolist()
        for (low, high), share in zip(itertools.pairwise(edges), share_H.tolist(), strict=True):
            rows.append(HistogramBin(compared.engine, part, low, high, share, share * len(mass_H) / 4))
    return rows


def _percentiles(values_P: NDArray[Any]) -> tuple[float, float]:
    """The 1st and the 99th percentile."""
    low, high = np.quantile(values_P, (0.01, 0.99))
    return float(low), float(high)


def _over_bins(compared: Compared, low: float, high: float) -> dict[str, Any]:
    """The fields of a ProbabilityBin over all bins from `low` to `high`, nats."""
    sums = {name: _sum(compared, name, low, high) for name in ("mass", "size", "signed", "paper", "second")}
    ratios = {name: (sums[name], sums["mass"]) for name in ("size", "signed", "paper", "second")}
    ratios["balance"] = sums["signed"], sums["size"]
    intervals = {name: ratio_interval(*ratio, compared.clusters) for name, ratio in ratios.items()}
    mass = float(sums["mass"].sum())
    return {"engine": compared.engine, "nats_from": low, "nats_to": high, "mass": mass, **intervals}


def _over_eps_max(compared: Compared, low: float, high: float) -> dict[str, Any]:
    """A Signature's other fields: means of −Δ and of Prop. 4.3's mode in units of ε_max, where there is a mismatch."""
    apart_P = compared.arrays["half_range_P"] > 0
    half_range_P, clusters_P = compared.arrays["half_range_P"][apart_P], compared.clusters[apart_P]
    mass_P, signed_P, paper_P = (_sum(compared, name, low, high)[apart_P] for name in ("mass", "signed", "paper"))
    scaled = {"signed_eps_max": signed_P / half_range_P, "paper_eps_max": paper_P / half_range_P}
    return {name: ratio_interval(sum_P, mass_P, clusters_P) for name, sum_P in scaled.items()}


def _sum(compared: Compared, name: str, low: float, high: float) -> NDArray[np.float64]:
    """The sum of an array over all its bins of −ln π_train from `low` to `high`, nats: (P,)."""
    inside = [index for index, edge in enumerate(compared.record["edges"]) if low <= edge < high]
    sum_P: NDArray[np.float64] = compared.arrays[f"{name}_PB"][:, inside].sum(axis=1)
    return sum_P
