"""What the comparisons of engines' whole distributions with the trainer's left, and the numbers made of it.

Intervals are over problems: the places of the responses to one are alike.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.analysis.describe import DEFAULTS, describe_disturbance, describe_sampler, flatten
from tailrl.artifacts.files import parse_arrays
from tailrl.artifacts.manifest import read_vouched
from tailrl.artifacts.probes import DistributionsRecord
from tailrl.artifacts.records import read_record
from tailrl.stats.intervals import Interval, cluster_interval, ratio_interval, share_interval

ARRAYS = (
    *("response_P", "problem_P", "logp_train_P", "logp_infer_P", "tv_P", "kl_train_infer_P", "kl_infer_train_P"),
    *("delta_max_P", "half_range_P", "entropy_train_P", "flip_P"),
    *("kept_train_PS", "kept_infer_PS", "kept_both_PS", "log_kept_train_PS", "outside_PS", "k3_PS"),
    *("mass_PB", "size_PB", "signed_PB", "paper_PB", "second_PB", "head_PH", "tail_PH"),
)
"""What is read of positions.npz; `tailrl.probes.distributions.comparison.Comparison` says what each is."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What one engine's job left: its name in the study, its record, and its arrays over P places."""

    engine: str
    record: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    @property
    def clusters(self) -> NDArray[Any]:
        """The problem of each place: what is alike within it is one unit of every interval."""
        return self.arrays["problem_P"]

    @property
    def words(self) -> str:
        """What is compared with the trainer."""
        settings = self.record["settings"]["engine"]
        left = flatten({key: value for key, value in settings.items() if key != "rescored"})
        engine = describe_sampler(left)
        if settings["rescored"]:
            packed = "alone" if settings["rescored"] == 1 else f"in at most {settings['rescored']} tokens"
            return f"the trainer itself, responses packed {packed}; sampled by {engine}"
        clauses = [engine, *describe_disturbance(left)]
        return "; ".join(clauses + [f"{key} = {value}" for key, value in left.items() if value != DEFAULTS.get(key)])


@dataclass(frozen=True, slots=True)
class Distance:
    """One engine's distance from the trainer over all compared places; nats, but for shares of 1.

    Attributes:
        equal: places at which the two distributions are the same, to the bit.
        tv, tv_p01, tv_p99: total variation, mean with interval, 1st and 99th percentile.
        kl_train_infer, kl_infer_train: either divergence.
        delta, delta_p99: |Δ| of the sampled token.
        delta_max: mean over places of the largest |Δ| of any token; half_range: of Prop. 4.2's ε_max.
        flips, flip_share: places at which greedy decoding differs, and their share with Wilson's interval.
    """

    engine: str
    what: str
    responses: int
    places: int
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
    """The min-p sets of the trainer and of one engine at one ρ, over all compared places.

    Attributes:
        kept_train, kept_infer: mean |V_S| and |V'_S|; lost_train: mean 1 − Z in the trainer.
        outside: probability that the engine samples a token outside the trainer's set.
        k3: expected k3 of a token sampled from the engine's set, those outside the trainer's adding nothing; nats.
        overlap, overlap_p01, overlap_p99, overlap_least: |V_S ∩ V'_S| / |V_S|: mean, 1st and 99th percentile, smallest.
        different: places at which the sets differ; responses_different: responses with such a place.
    """

    engine: str
    rho: str
    places: int
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
    """Tokens with −ln π_train in [nats_from, nats_to), each counted with the engine's probability of it.

    Attributes:
        mass: how many of them the engine is expected to sample at the compared places.
        size, signed: mean |Δ| and mean −Δ of those, nats.
        balance: the second over the first, from −1 to 1: 1 where the engine overrates every one of them.
        paper, second: the mode of −Δ that iid noise in the logits predicts, nats: by arXiv 2512.23087, Prop. 4.3, and
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
    """The row of the head, of the tail, or of what lies between.

    Attributes:
        part: which of the three.
        signed_eps_max, paper_eps_max: means of −Δ / ε_max and of Prop. 4.3's mode over ε_max, each place with its own
            ε_max: the unit of the histograms. NaN where no place has a mismatch.
    """

    part: str
    signed_eps_max: Interval
    paper_eps_max: Interval


@dataclass(frozen=True, slots=True)
class HistogramBin:
    """Tokens of the head or of the tail with −Δ / ε_max in [eps_max_from, eps_max_to), each counted with the engine's
    probability of it, at the places that have a mismatch.

    Attributes:
        part: head or tail.
        share: of what the engine samples of this part; density: that by the width of the bin.
    """

    engine: str
    part: str
    eps_max_from: float
    eps_max_to: float
    share: float
    density: float


def read_compared(folder: Path, engine: str) -> Compared:
    """What one engine's job left in a folder; raises StudyError for a file that is missing or cannot be used."""
    record, path = read_record(folder, DistributionsRecord), folder / "positions.npz"
    return Compared(engine, record.model_dump(), parse_arrays(read_vouched(path), ARRAYS, path))


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
    for index, rho in enumerate(compared.record["settings"]["rho"]):
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
    """The rows of one engine for its head, its tail, and what lies between."""
    edges = 0.0, compared.record["head_below"], compared.record["tail_from"], math.inf
    return [
        Signature(**_over_bins(compared, low, high), part=part, **_over_eps_max(compared, low, high))
        for part, (low, high) in zip(("head", "between", "tail"), itertools.pairwise(edges), strict=True)
    ]


def histograms(compared: Compared) -> list[HistogramBin]:
    """The rows of one engine for its head and its tail, bin by bin; none for a part without any mismatch."""
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
    """The 1st and the 99th."""
    low, high = np.quantile(values_P, (0.01, 0.99))
    return float(low), float(high)


def _over_bins(compared: Compared, low: float, high: float) -> dict[str, Any]:
    """The fields of a ProbabilityBin, of all bins from `low` to `high`, nats."""
    sums = {name: _sum(compared, name, low, high) for name in ("mass", "size", "signed", "paper", "second")}
    ratios = {name: (sums[name], sums["mass"]) for name in ("size", "signed", "paper", "second")}
    ratios["balance"] = sums["signed"], sums["size"]
    intervals = {name: ratio_interval(*ratio, compared.clusters) for name, ratio in ratios.items()}
    mass = float(sums["mass"].sum())
    return {"engine": compared.engine, "nats_from": low, "nats_to": high, "mass": mass, **intervals}


def _over_eps_max(compared: Compared, low: float, high: float) -> dict[str, Any]:
    """What a Signature has more: means of −Δ and of Prop. 4.3's mode in units of each place's ε_max, if it has one."""
    half_range_P = compared.arrays["half_range_P"]
    apart_P = half_range_P > 0
    mass_P = _sum(compared, "mass", low, high)[apart_P]
    scaled = {
        f"{name}_eps_max": _sum(compared, name, low, high)[apart_P] / half_range_P[apart_P]
        for name in ("signed", "paper")
    }
    return {name: ratio_interval(sum_P, mass_P, compared.clusters[apart_P]) for name, sum_P in scaled.items()}


def _sum(compared: Compared, name: str, low: float, high: float) -> NDArray[np.float64]:
    """Of one of the arrays by −ln π_train, the sum over all bins from `low` to `high`, nats: [P]."""
    inside = [index for index, edge in enumerate(compared.record["edges"]) if low <= edge < high]
    sum_P: NDArray[np.float64] = compared.arrays[f"{name}_PB"][:, inside].sum(axis=1)
    return sum_P
