"""The mismatch by lag and by depth.

A response's lag is its step minus the version of the weights that sampled it. At lag 0 both sides have the same
weights, so what differs there is the engine's floor. At other lags staleness comes on top. A token's depth is its place
in the response, from 1: what grows with it comes from caches, positions or errors that add up.

With ℓ = log π_train − log π_infer of a sampled token, in nats. Sums are exact. Quantiles come from a histogram of ℓ,
whose bins are 1 % wide. So memory does not grow with the log.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray, Log, sound
from tailrl.stats.verl import bounded_ratio

BEYOND = (0.5, 1.0, 2.0)  # nats: the tails are the shares of tokens with a larger |ℓ|
SINGLE_LAGS = 8  # lags up to here have a row each; larger ones share rows, 9 to 16, 17 to 32 and so on
LOWEST, HIGHEST, BINS = -9.0, 3.0, 2764
"""Of log10 |ℓ|: the ends and the number of its bins, each 1 % wide. A smaller |ℓ| counts as 0."""

AHEAD, UNKNOWN = "below 0", "not logged"
"""The rows of responses whose weights are newer than their step, and of those without a step or a version."""


@dataclass
class Sizes:
    """Sums over the ℓ of a group of tokens; two groups' sums add up.

    Attributes:
        tokens, responses: how many; `responses` is 0 where tokens are not grouped by response.
        total, size, ratio, ratio_squared: Σℓ, Σ|ℓ|, Σe^ℓ, Σe^2ℓ, with ℓ clamped to ±20 in the last two as verl does.
        largest: the largest |ℓ|.
        beyond: for each of BEYOND, the tokens with a larger |ℓ|.
        counts: tokens by ℓ: negative ones by falling |ℓ|, then about 0, then positive ones by rising |ℓ|.
        peak, weight, weight_squared: of responses' ratios e^Σℓ: the largest Σℓ, and Σ of ratios and of their squares,
            each over e^peak and e^2peak.
    """

    tokens: int = 0
    responses: int = 0
    total: float = 0.0
    size: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    largest: float = 0.0
    beyond: IntArray = field(default_factory=lambda: np.zeros(len(BEYOND), np.int64))
    counts: IntArray = field(default_factory=lambda: np.zeros(2 * BINS + 1, np.int64))
    peak: float = -math.inf
    weight: float = 0.0
    weight_squared: float = 0.0

    def add_tokens(self, delta_T: FloatArray) -> None:
        """Adds tokens' ℓ, finite, nats."""
        if not len(delta_T):
            return
        size_T, ratio_T = np.abs(delta_T), bounded_ratio(delta_T)
        self.tokens += len(delta_T)
        self.total += float(delta_T.sum())
        self.size += float(size_T.sum())
        self.ratio += float(ratio_T.sum())
        self.ratio_squared += float((ratio_T**2).sum())
        self.largest = max(self.largest, float(size_T.max()))
        self.beyond += [int((size_T > nats).sum()) for nats in BEYOND]
        with np.errstate(divide="ignore"):
            place_T = np.floor((np.log10(size_T) - LOWEST) * (BINS / (HIGHEST - LOWEST)))
        place_T = np.sign(delta_T) * (np.clip(place_T, -1, BINS - 1) + 1)
        self.counts += np.bincount(place_T.astype(np.int64) + BINS, minlength=len(self.counts))

    @np.errstate(over="ignore")
    def add_responses(self, whole_S: FloatArray) -> None:
        """Adds responses' Σℓ, finite, nats."""
        if not len(whole_S):
            return
        self.responses += len(whole_S)
        peak = float(whole_S.max())
        weight_S = np.exp(whole_S - peak)
        self._add_weights(peak, float(weight_S.sum()), float((weight_S**2).sum()))

    def _add_weights(self, peak: float, weight: float, weight_squared: float) -> None:
        highest = max(self.peak, peak)
        if not math.isfinite(highest):
            return
        own, other = math.exp(self.peak - highest), math.exp(peak - highest)
        self.weight = self.weight * own + weight * other
        self.weight_squared = self.weight_squared * own**2 + weight_squared * other**2
        self.peak = highest

    def merge(self, other: "Sizes") -> None:
        """Adds another group's sums."""
        for name in ("tokens", "responses", "total", "size", "ratio", "ratio_squared", "beyond", "counts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        self._add_weights(other.peak, other.weight, other.weight_squared)

    def quantile(self, share: float) -> float:
        """The quantile of |ℓ|, nats, to 1 % of its value; NaN without tokens."""
        return _quantile(self.counts[BINS:] + np.append(0, self.counts[:BINS][::-1]), share, 0)

    @property
    def mean_abs(self) -> float:
        """The mean of |ℓ|, nats; NaN without tokens."""
        return self.size / self.tokens if self.tokens else math.nan

    @property
    def p99_abs(self) -> float:
        """The 99 % quantile of |ℓ|, nats, to 1 % of its value; NaN without tokens."""
        return self.quantile(0.99)

    @property
    def median(self) -> float:
        """The median of ℓ, nats, to 1 % of its value; NaN without tokens."""
        return _quantile(self.counts, 0.5, BINS)

    @property
    def ess(self) -> float:
        """Effective sample size of tokens' ratios, as a fraction; NaN without tokens."""
        return self.ratio**2 / (self.tokens * self.ratio_squared) if self.tokens else math.nan

    @property
    def ess_responses(self) -> float:
        """Effective sample size of responses' ratios, as a fraction; NaN without responses."""
        return self.weight**2 / (self.responses * self.weight_squared) if self.responses else math.nan


def _quantile(counts: IntArray, share: float, zero: int) -> float:
    """The value in the middle of the bin that holds a quantile; bin `zero` holds 0."""
    total = int(counts.sum())
    if not total:
        return math.nan
    place = int(np.searchsorted(np.cumsum(counts), share * total)) - zero
    if place == 0:
        return 0.0
    middle = LOWEST + (abs(place) - 0.5) * (HIGHEST - LOWEST) / BINS
    return math.copysign(10.0**middle, place)


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A row of either table: the lag or the depth, or the range of it, its ends (of the last depth ∞), and the sums."""

    name: str
    least: float
    most: float
    sizes: Sizes


@dataclass
class LagsAndDepths:
    """Adds up the parts of a log by lag and by depth.

    Attributes:
        by_lag: the sums of each row's tokens, by the row's number: see `lag_rows`.
        by_depth: the same by the power of two of the depth.
    """

    by_lag: dict[int, Sizes] = field(default_factory=dict)
    by_depth: dict[int, Sizes] = field(default_factory=dict)

    def add(self, log: Log) -> None:
        """Adds a part of a log; tokens without two log-probs are left out."""
        sound_T = sound(log)
        delta_T = np.minimum(log.trainer_T[sound_T], 0.0) - np.minimum(log.sampler_T[sound_T], 0.0)
        sequence_T = log.sequence_T[sound_T]
        count = len(log.start_S)
        whole_S = np.bincount(sequence_T, delta_T, count).astype(np.float64)
        real_S = np.bincount(sequence_T, minlength=count) > 0
        row_S = lag_rows(log.step_S - log.version_S)
        for row in np.unique(row_S[real_S]).tolist():
            sizes = self.by_lag.setdefault(row, Sizes())
            sizes.add_tokens(delta_T[row_S[sequence_T] == row])
            sizes.add_responses(whole_S[real_S & (row_S == row)])
        depth_T = np.ceil(np.log2(log.position_T[sound_T] + 1.0)).astype(np.int64)
        for power in np.unique(depth_T).tolist():
            self.by_depth.setdefault(power, Sizes()).add_tokens(delta_T[depth_T == power])

    def lags(self) -> tuple[SizeRow, ...]:
        """The table by lag, the smallest first; empty where no response has a step and a version."""
        rows = []
        for row, sizes in sorted(self.by_lag.items()):
            if row != UNKNOWN_ROW:
                least, most = _lag_ends(row)
                rows.append(SizeRow(AHEAD if row == AHEAD_ROW else _range(least, most), least, most, sizes))
        if rows and UNKNOWN_ROW in self.by_lag:
            rows.append(SizeRow(UNKNOWN, math.nan, math.nan, self.by_lag[UNKNOWN_ROW]))
        return tuple(rows)

    def depths(self) -> tuple[SizeRow, ...]:
        """The table by depth, the first tokens first."""
        rows = []
        for power, sizes in sorted(self.by_depth.items()):
            least, most = (2.0 ** (power - 1) + 1, 2.0**power) if power else (1.0, 1.0)
            rows.append(SizeRow(_range(least, most), least, most, sizes))
        return tuple(rows)


AHEAD_ROW, UNKNOWN_ROW = -1, -2


def lag_rows(lag_S: FloatArray) -> IntArray:
    """The row of each lag: itself up to SINGLE_LAGS, then one a doubling; AHEAD_ROW below 0, UNKNOWN_ROW for NaN."""
    known_S = np.isfinite(lag_S)
    whole_S = np.floor(np.where(known_S, lag_S, 0.0))
    doublings_S = np.ceil(np.log2(np.maximum(whole_S, 1.0) / SINGLE_LAGS))
    row_S = np.where(whole_S <= SINGLE_LAGS, np.maximum(whole_S, AHEAD_ROW), SINGLE_LAGS + doublings_S)
    return np.where(known_S, row_S, UNKNOWN_ROW).astype(np.int64)


def _lag_ends(row: int) -> tuple[float, float]:
    if row == AHEAD_ROW:
        return -math.inf, -1.0
    if row <= SINGLE_LAGS:
        return float(row), float(row)
    last = SINGLE_LAGS * 2.0 ** (row - SINGLE_LAGS)
    return last / 2 + 1, last


def _range(least: float, most: float) -> str:
    return f"{least:,.0f}" if least == most else f"{least:,.0f} to {most:,.0f}"


def lag_words(rows: Iterable[SizeRow]) -> str:
    """What the table by lag says, in a few sentences; empty for no rows."""
    known = [row for row in rows if math.isfinite(row.most)]
    if not known:
        return ""
    floor = next((row.sizes for row in known if row.name == "0"), None)
    later = [row.sizes for row in known if row.least > 0]
    says = []
    if floor:
        says.append(
            f"At lag 0 both sides have the same weights: the engine's floor is {floor.mean_abs:.3g} nats a token."
        )
    else:
        says.append("No response has lag 0, so the engine's floor is not known apart from staleness.")
    if later:
        tokens = sum(sizes.tokens for sizes in later)
        mean = sum(sizes.tokens * sizes.mean_abs for sizes in later) / tokens
        says.append(f"At larger lags it is {mean:.3g} nats.")
        if floor:
            says.append(f"So staleness adds {max(0.0, mean - floor.mean_abs):.3g}.")
    if any(row.name == AHEAD for row in known):
        says.append("Some responses have weights of after their step, which cannot be: check how both are counted.")
    return " ".join(says)
