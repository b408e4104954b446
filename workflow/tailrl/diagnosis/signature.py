"""What a mismatch looks like over positions and over both probabilities, in one pass and bounded memory."""

from dataclasses import dataclass, field

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray

POSITION_EDGES = (0, *(2**power for power in range(21)))
"""Of a token's place in its response: the bins' ends; the last bin holds all later tokens."""

LOGIT_EDGE, LOGIT_CELLS = 16.0, 40
"""The joint picture goes from −LOGIT_EDGE to LOGIT_EDGE in log-odds, and has as many cells on each side."""


def log_odds(logp_T: FloatArray) -> FloatArray:
    """log(p / (1 − p)) from log p, within ±LOGIT_EDGE: noise on logits has the same size everywhere on this axis."""
    with np.errstate(divide="ignore"):
        found: FloatArray = np.clip(logp_T - np.log(-np.expm1(logp_T)), -LOGIT_EDGE, LOGIT_EDGE)
    return found


@dataclass
class SignatureSums:
    """Sums over the parts of a log.

    Attributes:
        groups: groups of sequences that a bin's sums are kept for: its error comes from how much they differ.
        positions: (groups, bins): tokens, Σ|Δ|, ΣΔ.
        joint: (LOGIT_CELLS, LOGIT_CELLS), numbers of tokens: rows by the trainer's log-odds, columns by the sampler's.
    """

    groups: int
    positions: dict[str, FloatArray] = field(default_factory=dict)
    joint: FloatArray = field(default_factory=lambda: np.zeros((LOGIT_CELLS, LOGIT_CELLS)))

    def add(self, trainer_T: FloatArray, sampler_T: FloatArray, position_T: IntArray, group_T: IntArray) -> None:
        """Adds tokens with two log-probs, nats, at most 0; groups are numbered from 0."""
        bins = len(POSITION_EDGES)
        place_T = np.searchsorted(POSITION_EDGES, position_T, side="right") - 1
        delta_T, cell_T = trainer_T - sampler_T, group_T * bins + place_T
        for name, values_T in (("tokens", np.ones(len(trainer_T))), ("size", np.abs(delta_T)), ("signed", delta_T)):
            found = np.bincount(cell_T, values_T, self.groups * bins).reshape(self.groups, bins).astype(np.float64)
            self.positions[name] = self.positions.get(name, 0.0) + found
        row_T, column_T = (_cell(log_odds(side_T)) for side_T in (trainer_T, sampler_T))
        self.joint += np.bincount(row_T * LOGIT_CELLS + column_T, minlength=LOGIT_CELLS**2).reshape(self.joint.shape)


def _cell(odds_T: FloatArray) -> IntArray:
    place_T = np.floor((odds_T + LOGIT_EDGE) * LOGIT_CELLS / (2 * LOGIT_EDGE)).astype(np.int64)
    return np.minimum(place_T, LOGIT_CELLS - 1)
