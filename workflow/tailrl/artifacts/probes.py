"""What the probes leave: their run.json, positions.npz, quality.jsonl. The only reader and writer of the last two.

No run depends on what is said here.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, field_validator

from tailrl.artifacts.files import Record, parse_arrays, parse_lines
from tailrl.artifacts.manifest import read_vouched
from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.records import Count, JobRecord
from tailrl.config.distributions import Distributions
from tailrl.config.gradients import Gradients
from tailrl.runtime.errors import DataError

WHERE = ("response_P", "problem_P", "position_P", "token_P")
"""The first arrays of positions.npz, int32, of each sampled token: its response (by request), its problem, its position
in the response, and its id. The others are the fields of `Positions`."""

Counts = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Positions:
    """An engine's and the trainer's distributions at P states; nats, float64, unless said otherwise.

    Attributes:
        logp_train_P, logp_infer_P: log-prob of the sampled token; Δ is their difference.
        tv_P: total variation, ½ Σ |π_train − π_infer|, in [0, 1].
        kl_train_infer_P, kl_infer_train_P: KL(π_train ‖ π_infer), and the other way round.
        delta_max_P: largest |Δ| of any token.
        half_range_P: (max Δ − min Δ) / 2: the ε_max of arXiv 2512.23087, Prop. 4.2, which ignores shifts.
        entropy_train_P, entropy_infer_P: entropies.
        flip_P: bool, whether greedy decoding chooses different tokens (of equal logits, the first token).
        kept_train_PS, kept_infer_PS, kept_both_PS: int32, tokens in V_S, in V'_S and in both, for S thresholds.
        log_kept_train_PS, log_kept_infer_PS: log Z and log Z', the mass of either safe set.
        outside_PS: Σ π_infer over the tokens outside V_S: the chance that the engine samples a token outside V_S.
        k3_PS: Σ q' (r − 1 − ln r) over the tokens of both sets, with q' = π_infer / Z' and r = (π_train / Z) / q': the
            expected k3 of a token that the engine samples from V'_S. Tokens outside V_S add nothing (training's metric
            leaves them out of its mean). If both sets hold every token, it is KL(π_infer ‖ π_train).
        mass_PB, size_PB, signed_PB: Σ π_infer, Σ π_infer |Δ| and −Σ π_infer Δ over the tokens whose −ln π_train lies
            in each of B bins, from the record's `edges`. The last two over the first are means over tokens that the
            engine samples.
        paper_PB, second_PB: Σ π_infer m over the same bins. m is the mode of −Δ of a sampled token as iid noise of
            this state's variance predicts it: by arXiv 2512.23087, Prop. 4.3, and to second order.
        head_PH, tail_PH: Σ π_infer over the tokens of the head and of the tail, by −Δ / ε_max in H bins; 0 if the two
            distributions are equal.
    """

    logp_train_P: FloatArray
    logp_infer_P: FloatArray
    tv_P: FloatArray
    kl_train_infer_P: FloatArray
    kl_infer_train_P: FloatArray
    delta_max_P: FloatArray
    half_range_P: FloatArray
    entropy_train_P: FloatArray
    entropy_infer_P: FloatArray
    flip_P: NDArray[np.bool_]
    kept_train_PS: Counts
    kept_infer_PS: Counts
    kept_both_PS: Counts
    log_kept_train_PS: FloatArray
    log_kept_infer_PS: FloatArray
    outside_PS: FloatArray
    k3_PS: FloatArray
    mass_PB: FloatArray
    size_PB: FloatArray
    signed_PB: FloatArray
    paper_PB: FloatArray
    second_PB: FloatArray
    head_PH: FloatArray
    tail_PH: FloatArray

    @classmethod
    def joined(cls, parts: Sequence["Positions"]) -> "Positions":
        """The states of all parts, concatenated."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class ExpertFlips:
    """An engine's and the trainer's experts at P states in L layers of experts.

    Attributes:
        expert_flip_PL: bool, whether the trainer's router chooses another set of experts than the engine's.
        margin_PL: float32, nats, the trainer's margin (`model.routing.Routing.margins`).
    """

    expert_flip_PL: NDArray[np.bool_]
    margin_PL: NDArray[np.float32]

    def at(self, rows: Sequence[int]) -> "ExpertFlips":
        """Some of the states, in this order."""
        return ExpertFlips(self.expert_flip_PL[rows], self.margin_PL[rows])


def write_positions(
    job: Path, where_P4: NDArray[np.int32], found: Positions, experts: Sequence[ExpertFlips] = ()
) -> None:
    """Write positions.npz into a job's folder; `where_P4` has the columns of `WHERE`, `experts` parts of its states."""
    names = [field.name for field in fields(ExpertFlips)] if experts else []
    more = {name: np.concatenate([getattr(part, name) for part in experts]) for name in names}
    np.savez_compressed(job / "positions.npz", **dict(zip(WHERE, where_P4.T, strict=True)), **asdict(found), **more)


def read_positions(job: Path, routed: bool = False) -> dict[str, NDArray[Any]]:
    """All arrays of positions.npz, by name, with those of `ExpertFlips` if the engine said which experts it chose.

    Raises StudyError if one is missing, unreadable, empty or ragged.
    """
    path = job / "positions.npz"
    kinds = (Positions, ExpertFlips) if routed else (Positions,)
    names = [field.name for kind in kinds for field in fields(kind)]
    arrays = parse_arrays(read_vouched(path), (*WHERE, *names), path)
    shapes = {arrays[field.name].shape for field in fields(ExpertFlips)} if routed else set()
    if routed and (len(shapes) > 1 or len(next(iter(shapes))) != 2):
        raise DataError(f"{path}: its flips and margins do not hold one number a layer of experts")
    return arrays


class DistributionsRecord(JobRecord):
    """A comparison of an engine's distributions with the trainer's; `tailrl.probes.distributions` says what its numbers
    are."""

    kind = Distributions

    @property
    def compared(self) -> Distributions:
        """The settings as a model."""
        return Distributions.model_validate(self.settings)

    vocabulary: Count
    tokens: Count
    edges: list[float]
    head_below: float
    tail_from: float
    sampler_self_test: float | None


class GradientsRecord(JobRecord):
    """A probe of the arms' gradient estimators."""

    kind = Gradients

    @property
    def probe(self) -> Gradients:
        """The settings as a model."""
        return Gradients.model_validate(self.settings)


class Quality(Record):
    """The gradient ĝ of one arm's step, on one model at one dose; norms are in units of |∇J|.

    Attributes:
        model: number of the random model.
        mismatch, dose: none, noise, floor, bias or rounding, and its dose; at equal k3 this k3 in place of the dose.
        arm: name of the arm.
        divergence: KL(π_infer ‖ π_train) per token over the full vocabulary, nats: the expectation of k3.
        bias: |E ĝ − ∇J|.
        bias_constrained: |E ĝ − ∇J_mp| in units of |∇J_mp|; J_mp is the return of the trainer's own pruned policy; nan
            if J_mp is flat.
        lacking: share of states in which the sampler's set lacks a token of the trainer's; Thm 5.3 assumes none.
        deviation: root of the trace of ĝ's covariance.
        error: root mean squared |ĝ − ∇J|.
        direction: cosine between E ĝ and ∇J; nan if E ĝ is 0.
        cosine: mean cosine between ĝ and ∇J over sampled steps; 0 for ĝ = 0.
        cosine_half_width: half the width of its 95 % interval over the sampled steps.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    model: int
    mismatch: str
    dose: float
    arm: str
    divergence: float
    bias: float
    bias_constrained: float
    lacking: float
    deviation: float
    error: float
    direction: float
    cosine: float
    cosine_half_width: float

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_nan(cls, value: object) -> object:
        return math.nan if value is None else value


def write_quality(job: Path, qualities: Iterable[Quality]) -> None:
    """Write quality.jsonl into a job's folder, a line each as it comes; NaN becomes null."""
    with (job / "quality.jsonl").open("w", encoding="utf-8") as file:
        for quality in qualities:
            cells = {name: None if value != value else value for name, value in quality.model_dump().items()}
            file.write(json.dumps(cells) + "\n")


def read_quality(job: Path) -> list[Quality]:
    """The lines of quality.jsonl in a job's folder; raises StudyError if it cannot be used."""
    path = job / "quality.jsonl"
    return parse_lines(Quality, read_vouched(path), path)
