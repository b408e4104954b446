"""What the comparisons of engines' whole distributions with the trainer's left, and the numbers made of it.

Intervals are over problems: the places of the responses to one are alike.
"""

import itertools
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.errors import StudyError, reason
from tailrl.report.provenance import DEFAULTS, describe_disturbance, describe_sampler, flatten
from tailrl.report.statistics import Interval, cluster_interval, ratio_interval, share_interval

ARRAYS = (
    *("response_P", "problem_P", "logp_train_P", "logp_infer_P", "tv_P", "kl_train_infer_P", "kl_infer_train_P"),
    *("delta_max_P", "half_range_P", "entropy_train_P", "flip_P"),
    *("kept_train_PS", "kept_infer_PS", "kept_both_PS", "log_kept_train_PS", "outside_PS"),
    *("mass_PB", "size_PB", "signed_PB", "paper_PB", "second_PB", "head_PH", "tail_PH"),
)
"""What is read of positions.npz; `tailrl.distributions.comparison.Comparison` says what each is."""

RECORD = ("settings", "edges", "head_below", "tail_from", "tokens", "vocabulary")
"""What is read of run.json."""


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
        tv, tv_p99: total variation, mean with interval and 99th percentile.
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
        overlap, overlap_p01, overlap_least: |V_S ∩ V'_S| / |V_S|: mean, 1st percentile and smallest.
        different: places at which the sets differ; responses_different: responses with such a place.
    """

    engine: str
    rho: str
    places: int
    kept_train: float
    kept_infer: float
    lost_train: float
    outside: Interval
    overlap: Interval
    overlap_p01: float
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


def read_compared(folder: Path, engine: str) -> Compared:
    """What one engine's job left in a folder; raises StudyError for a file that is missing or cannot be used."""
    path = folder / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in RECORD if name not in record]
        if missing:
            raise StudyError(f"{path}: has no {missing[0]}")
        path = folder / "positions.npz"
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                raise StudyError(f"{path}: has no {missing[0]}")
            arrays = {name: file[name] for name in ARRAYS}
    except FileNotFoundError:
        raise StudyError(f"{path}: is missing") from None
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise StudyError(f"{path}: cannot be read: {reason(error)}") from None
    lengths = {len(values) for values in arrays.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise StudyError(f"{path}: its arrays hold {', '.join(map(str, sorted(lengths)))} places")
    return Compared(engine, record, arrays)


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
        *mean(a["tv_P"]),
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
                cluster_interval(overlap_P, compared.clusters),
                float(np.quantile(overlap_P, 0.01)),
                float(overlap_P.min()),
                int(differs_P.sum()),
                len(np.unique(a["response_P"][differs_P])),
            )
        )
    return rows


def probability_bins(compared: Compared) -> list[ProbabilityBin]:
    """The rows of one engine, one for each bin of token probability."""
    edges = [*compared.record["edges"], math.inf]
    return [_over_bins(compared, low, high) for low, high in itertools.pairwise(edges)]


def signature(compared: Compared) -> list[ProbabilityBin]:
    """The rows of one engine for its head, its tail, and what lies between."""
    record = compared.record
    return [
        _over_bins(compared, low, high)
        for low, high in itertools.pairwise((0.0, record["head_below"], record["tail_from"], math.inf))
    ]


def _over_bins(compared: Compared, low: float, high: float) -> ProbabilityBin:
    """The row of all bins from `low` to `high`, nats."""
    inside = [index for index, edge in enumerate(compared.record["edges"]) if low <= edge < high]
    names = ("mass", "size", "signed", "paper", "second")
    mass_P, size_P, *signed = (compared.arrays[f"{name}_PB"][:, inside].sum(axis=1) for name in names)
    ratios = (size_P, mass_P), (signed[0], mass_P), (signed[0], size_P), (signed[1], mass_P), (signed[2], mass_P)
    intervals = [ratio_interval(*ratio, compared.clusters) for ratio in ratios]
    return ProbabilityBin(compared.engine, low, high, float(mass_P.sum()), *intervals)
