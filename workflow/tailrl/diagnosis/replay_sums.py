"""What the replay of remedies adds up: a part's sound tokens, and the sums of one setting's weights over them."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray, Log, sound
from tailrl.diagnosis.parts import part_of
from tailrl.objective.kl_estimates import k3

BoolArray = NDArray[np.bool_]

BASES = ("advantage", "reward")
"""What the gradient's direction is taken with: the first that the log has."""


def sound_tokens(log: Log) -> Log:
    """The tokens with two sound log-probs, none above 0. `recomputed_T` is the trainer's from the update's begin: its
    only one where no other is logged."""
    begin_T = np.where(np.isnan(log.recomputed_T), log.trainer_T, log.recomputed_T)
    tokens = part_of(replace(log, recomputed_T=begin_T), sound(log) & sound(replace(log, trainer_T=begin_T)))
    begin_T = np.minimum(tokens.recomputed_T, 0.0)
    return replace(
        tokens,
        sampler_T=np.minimum(tokens.sampler_T, 0.0),
        trainer_T=tokens.trainer_T - (tokens.recomputed_T - begin_T),
        recomputed_T=begin_T,
    )


def moved(tokens: Log) -> FloatArray:
    """How far the trainer's log-probs moved since the update's begin, [T] nats, of `sound_tokens`."""
    return tokens.trainer_T - tokens.recomputed_T


@dataclass(frozen=True, slots=True)
class PartSums:
    """What the sums of every setting need of a part.

    Attributes:
        k3_T, prob_T: of the trainer against the sampler, and of the trainer.
        sequence_T, first_T: each token's response; whether it is the first of it.
        values: for each of BASES that some token has: a², a and 1, each 0 where there is none, [3, T].
    """

    k3_T: FloatArray
    prob_T: FloatArray
    sequence_T: IntArray
    first_T: np.ndarray
    values: dict[str, FloatArray]

    @classmethod
    def of(cls, tokens: Log) -> "PartSums":
        """What is known of a part's `sound_tokens` before any setting."""
        delta_T = tokens.recomputed_T - tokens.sampler_T
        given = {"advantage": tokens.advantage_T, "reward": tokens.reward_S[tokens.sequence_T]}
        values = {
            name: np.stack([np.nan_to_num(a_T) ** 2, np.nan_to_num(a_T), ~np.isnan(a_T)]).astype(np.float64)
            for name, a_T in given.items()
            if not np.isnan(a_T).all()
        }
        first_T = np.diff(tokens.sequence_T, prepend=-1) != 0
        return cls(k3(delta_T), np.exp(tokens.recomputed_T), tokens.sequence_T, first_T, values)


def weight_sums(weight_T: FloatArray, known: PartSums) -> dict[str, float]:
    """The sums that a row of the table needs, of one setting's weights on a part."""
    kept_T = weight_T > 0
    with np.errstate(over="ignore"):  # an effective sample size of 0 then, and no cosine
        squared_T = weight_T**2
    found: dict[str, float] = {
        "tokens": len(weight_T),
        "responses": int(np.count_nonzero(np.bincount(known.sequence_T[kept_T]))),
        "kept": int(np.count_nonzero(kept_T)),
        "weight": weight_T.sum(),
        "squared": squared_T.sum(),
        "largest": weight_T.max(),
        "k3": known.k3_T[kept_T].sum(),
        "prob": known.prob_T[kept_T].sum(),
    }
    for name, value_3T in known.values.items():
        found[f"{name}_total"] = float(value_3T[1] @ known.first_T)
        found[f"{name}_responses"] = float(value_3T[2] @ known.first_T)
        for kind, by_T in (("weight", weight_T), ("squared", squared_T)):
            summed_3 = value_3T @ by_T if np.isfinite(by_T).all() else _times(value_3T, by_T).sum(1)
            found |= dict(zip((f"{name}_{kind}_{power}" for power in ("aa", "a", "1")), summed_3, strict=True))
    return {name: float(value) for name, value in found.items()}


def _times(value_3T: FloatArray, weight_T: FloatArray) -> FloatArray:
    """Values times weights, where a zero wins over an infinity: a token without an advantage adds nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(value_3T == 0, 0.0, value_3T * weight_T)


def add_sums(sums: dict[str, float], more: dict[str, float]) -> None:
    """Adds a part's sums; of the largest weight it keeps the larger."""
    for name, value in more.items():
        sums[name] = max(value, sums.get(name, value)) if name == "largest" else sums.get(name, 0.0) + value
