"""What a log holds, in one pass: sums for each sequence, which give every mean its interval, and counts of oddities.

With ℓ = log π_train − log π_infer of a sampled token, in nats. Tokens whose log-probs are none (NaN, −inf, above 0)
are counted and left out. Memory grows with the sequences, not with their tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import LOGPROB_ROUNDING, IntArray, Log, sound
from tailrl.diagnosis.signals import LOGIT_EDGE, Signals, log_odds
from tailrl.objective.kl_estimates import k2, k3
from tailrl.stats.intervals import Interval, mean_interval, ratio_interval
from tailrl.stats.verl import bounded_ratio, truncated_ratio

NATS_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, np.inf)
"""Of −log π_train, nats: the bins' ends."""

POSITION_EDGES = (0, *(2**power for power in range(21)), np.inf)
"""Of a token's place in its response: the bins' ends; the last bin holds all later tokens."""

LOGIT_CELLS = 40
"""The joint picture goes from −LOGIT_EDGE to LOGIT_EDGE in log-odds, and has as many cells on each side."""

SEQUENCE_GROUPS = 32
"""Groups of sequences that a binned quantity is kept for: its error comes from how much they differ."""

VERL_THRESHOLD = 2.0  # verl's default of rollout_is_threshold

Both = Callable[[FloatArray, FloatArray], FloatArray]


def _to_mixture(log_p: FloatArray, log_q: FloatArray) -> FloatArray:
    """k3 of p and (p + q) / 2."""
    return k3(log_p - (np.logaddexp(log_p, log_q) - np.log(2)))


TOKEN: dict[str, Both] = {
    "k1": lambda trainer, sampler: sampler - trainer,
    "k2": lambda trainer, sampler: k2(trainer - sampler),
    "k3": lambda trainer, sampler: k3(trainer - sampler),
    "k3_reverse": lambda trainer, sampler: k3(sampler - trainer),
    "abs_logp": lambda trainer, sampler: np.abs(trainer - sampler),
    "abs_prob": lambda trainer, sampler: np.abs(np.exp(trainer) - np.exp(sampler)),
    "abs_prob_squared": lambda trainer, sampler: np.abs(np.exp(trainer) - np.exp(sampler)) ** 2,
    "js": lambda trainer, sampler: _to_mixture(trainer, sampler) / 2 + _to_mixture(sampler, trainer) / 2,
    "ratio": lambda trainer, sampler: bounded_ratio(trainer - sampler),
    "ratio_squared": lambda trainer, sampler: bounded_ratio(trainer - sampler) ** 2,
    "error_factor": lambda trainer, sampler: np.exp(np.abs(trainer - sampler)),
    "logp_train": lambda trainer, _: trainer,
    "logp_infer": lambda _, sampler: sampler,
    "prob_train": lambda trainer, _: np.exp(trainer),
    "prob_infer": lambda _, sampler: np.exp(sampler),
    "prob_train_squared": lambda trainer, _: np.exp(2 * trainer),
    "prob_infer_squared": lambda _, sampler: np.exp(2 * sampler),
    "prob_product": lambda trainer, sampler: np.exp(trainer + sampler),
    "truncated": lambda trainer, sampler: truncated_ratio(trainer - sampler, VERL_THRESHOLD),
    "truncated_squared": lambda trainer, sampler: truncated_ratio(trainer - sampler, VERL_THRESHOLD) ** 2,
    "outside_tenth": lambda trainer, sampler: (np.abs(np.expm1(trainer - sampler)) > 0.1).astype(np.float64),
    "above_two": lambda trainer, sampler: (trainer - sampler > np.log(2)).astype(np.float64),
    "below_half": lambda trainer, sampler: (trainer - sampler < -np.log(2)).astype(np.float64),
}
"""Of each token, from log π_train and log π_infer [T], nats. k1 and k3 estimate KL(π_infer ‖ π_train); k3_reverse adds
its terms with π_train and π_infer exchanged, as NeMo-RL's policy KL does, over the same sampled tokens; js compares
each side with their mixture in this way. `ratio` and `truncated` are verl's, with log-ratios clamped to ±20 nats."""


@dataclass
class Measured:
    """What was measured of the logs read so far.

    Attributes:
        titles: the formats, with their numbers of sequences. frameworks: those that the rows name themselves.
        odd: numbers of tokens that were left out, by reason.
        has: the optional columns that were found. experts: the words of the rows' column `experts`.
        sums_S: for each statistic of TOKEN its sum over each sequence's tokens; `tokens`: their number.
        extremes: the largest and least values over all tokens.
        floor: the same of the trainer against itself, over tokens that it scored a second time; None: not logged.
        bins: by −log π_train, (SEQUENCE_GROUPS, bins): tokens, Σ|ℓ|, Σℓ, Σ(1 − π_train).
        positions: by the place in the response, (SEQUENCE_GROUPS, bins): tokens, Σ|ℓ|.
        joint: (LOGIT_CELLS, LOGIT_CELLS), numbers of tokens: rows by the trainer's log-odds, columns by the sampler's.
        signals: what tells causes apart.
    """

    titles: Counter[str] = field(default_factory=Counter)
    frameworks: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    has: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    parts: dict[str, list[FloatArray]] = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)
    bins: dict[str, FloatArray] = field(default_factory=dict)
    positions: dict[str, FloatArray] = field(default_factory=dict)
    joint: FloatArray = field(default_factory=lambda: np.zeros((LOGIT_CELLS, LOGIT_CELLS)))
    floor: "Measured | None" = None
    signals: Signals = field(default_factory=Signals)
    sequences: int = 0

    @np.errstate(over="ignore", invalid="ignore")  # a log-prob of -1e6 is a finding
    def add(self, title: str, log: Log) -> None:
        """Adds a part of a log."""
        trainer_T, sampler_T = log.trainer_T, log.sampler_T
        for side, values_T in (("trainer", trainer_T), ("sampler", sampler_T)):
            self.odd[f"{side}'s NaN"] += int(np.isnan(values_T).sum())
            self.odd[f"{side}'s -inf"] += int(np.isneginf(values_T).sum())
            self.odd[f"{side}'s above 0"] += int((values_T > LOGPROB_ROUNDING).sum())
        sound_T = sound(log)
        self.signals.add(log, sound_T)
        trainer_T, sampler_T, sequence_T = trainer_T[sound_T], sampler_T[sound_T], log.sequence_T[sound_T]
        trainer_T, sampler_T = np.minimum(trainer_T, 0.0), np.minimum(sampler_T, 0.0)
        count = len(log.start_S)

        def total(values_T: FloatArray) -> FloatArray:
            return np.bincount(sequence_T, values_T, count).astype(np.float64)

        self.parts.setdefault("tokens", []).append(total(np.ones(len(trainer_T))))
        for name, of in TOKEN.items():
            self.parts.setdefault(name, []).append(total(of(trainer_T, sampler_T)))
        for name in ("step", "version", "reward", "prompt"):
            self.parts.setdefault(name, []).append(getattr(log, f"{name}_S"))
        self._extremes(trainer_T, sampler_T)
        group_T = (sequence_T + self.sequences) % SEQUENCE_GROUPS
        delta_T = trainer_T - sampler_T
        sizes = {"tokens": np.ones(len(delta_T)), "size": np.abs(delta_T)}
        _add_binned(self.positions, log.position_T[sound_T], POSITION_EDGES, group_T, sizes)
        _add_binned(
            self.bins, -trainer_T, NATS_EDGES, group_T, sizes | {"signed": delta_T, "rest": -np.expm1(trainer_T)}
        )
        row_T, column_T = _cell(trainer_T), _cell(sampler_T)
        self.joint += np.bincount(row_T * LOGIT_CELLS + column_T, minlength=LOGIT_CELLS**2).reshape(self.joint.shape)
        self.titles[title] += count
        self.frameworks.update(labels["framework"] for labels in log.labels_S if "framework" in labels)
        self.has |= log.has()
        self.experts |= {labels.get("experts", "") for labels in log.labels_S}
        self.sequences += count
        if "again" in log.has():
            self.floor = self.floor or Measured()
            unknown_T = np.full(len(log.again_T), np.nan)
            self.floor.add(title, replace(log, sampler_T=log.again_T, again_T=unknown_T))

    def _extremes(self, trainer_T: FloatArray, sampler_T: FloatArray) -> None:
        if not len(trainer_T):
            return
        delta_T = trainer_T - sampler_T
        found = {
            "abs_logp_max": float(np.abs(delta_T).max()),
            "abs_prob_max": float(np.abs(np.exp(trainer_T) - np.exp(sampler_T)).max()),
            "ratio_max": float(np.exp(delta_T.max())),
        }
        for name, value in found.items():
            self.extremes[name] = max(value, self.extremes.get(name, value))
        least = float(np.exp(delta_T.min()))
        self.extremes["ratio_min"] = min(least, self.extremes.get("ratio_min", least))

    def column(self, name: str) -> FloatArray:
        """A sequence's sums (or its number), for all sequences, [S]."""
        return np.concatenate(self.parts[name]) if self.parts else np.empty(0)

    @property
    def tokens(self) -> int:
        """The number of tokens with two log-probs."""
        return int(self.column("tokens").sum())

    def token_mean(self, name: str) -> Interval:
        """The mean of a statistic over tokens; sequences are the clusters."""
        tokens_S = self.column("tokens")
        return ratio_interval(self.column(name), tokens_S, np.arange(len(tokens_S)))

    def sequence_mean(self, of: Callable[[Callable[[str], FloatArray]], FloatArray]) -> Interval:
        """The mean over sequences with tokens of a function of their sums."""
        real_S = self.column("tokens") > 0
        return mean_interval(of(lambda name: self.column(name)[real_S]))


def _add_binned(
    sums: dict[str, FloatArray],
    by_T: NDArray[Any],
    edges: Sequence[float],
    group_T: IntArray,
    values: Mapping[str, FloatArray],
) -> None:
    """Adds values to the sums of their groups and bins; what lies outside the edges counts to the nearest bin."""
    bins = len(edges) - 1
    cell_T = group_T * bins + np.clip(np.searchsorted(edges, by_T, side="right") - 1, 0, bins - 1)
    for name, values_T in values.items():
        found = np.bincount(cell_T, values_T, SEQUENCE_GROUPS * bins).reshape(SEQUENCE_GROUPS, bins)
        sums[name] = sums.get(name, 0.0) + found.astype(np.float64)


def _cell(logp_T: FloatArray) -> IntArray:
    place_T = np.floor((log_odds(logp_T) + LOGIT_EDGE) * LOGIT_CELLS / (2 * LOGIT_EDGE)).astype(np.int64)
    return np.minimum(place_T, LOGIT_CELLS - 1)


def measure(parts: Iterable[tuple[str, Log]]) -> Measured:
    """Everything of the parts of a log."""
    measured = Measured()
    for title, log in parts:
        measured.add(title, log)
    return measured
