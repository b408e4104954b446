"""The numbers that claims on trained arms are measured by, one per run."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.claims.finding import ends
from tailrl.config.distributions import SAMPLED_HEAD_BELOW, TAIL_FROM
from tailrl.stats.tests import Difference
from tailrl.tracking import metrics as keys
from tailrl.tracking.alarm import SKEWED

PART = 0.1
"""The length of a run's start, its end and each stretch, as a share of its steps."""

_POWERS = 14.0
"""Logarithms are clipped to ± this, so that zeros (below rounding) and overflows count as numbers."""

EXACT_LOGARITHMS = 0.0, -_POWERS, _POWERS
"""Logarithms that no other seed would change: the clipped ones, and the ratio of two of them."""


def mean(values: FloatArray) -> float:
    """The mean without NaN entries; NaN without any other entry."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def log10(values: ArrayLike) -> FloatArray:
    """The decimal logarithm, clipped to ± _POWERS."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(values), -_POWERS, _POWERS)


def powers(logs: Difference) -> tuple[float, float, float]:
    """A mean of decimal logarithms and its interval, as numbers."""
    with np.errstate(over="ignore"):
        middle, low, high = (float(np.float64(10.0) ** end) for end in ends(logs))
    return middle, low, high


def stretches(run: TrainedRun, key: str) -> list[float]:
    """A metric's means over stretches of a tenth of the run's steps; NaN for a stretch without values."""
    values_N = run.metric(key)
    size = math.ceil(PART * values_N.size)
    return [mean(values_N[start : start + size]) for start in range(0, values_N.size, size)]


def first_and_last(run: TrainedRun, key: str) -> tuple[float, float]:
    """A metric's means over the first and the last tenth of the run's steps."""
    values_N = run.metric(key)
    size = math.ceil(PART * values_N.size)
    return mean(values_N[:size]), mean(values_N[-size:])


def growth(run: TrainedRun, key: str = keys.K3_UNMASKED) -> float:
    """Powers of ten by which the size of a run's metric grows from the first tenth of its steps to the last."""
    first, last = np.abs(first_and_last(run, key))
    return float(log10(last) - log10(first))


def tokens(run: TrainedRun) -> tuple[FloatArray, FloatArray]:
    """-ln π_train and Δ of a run's sampled tokens, nats, without tokens whose Δ is not finite."""
    delta_T = run.tokens.logp_train_T - run.tokens.logp_infer_T
    return -run.tokens.logp_train_T[np.isfinite(delta_T)], delta_T[np.isfinite(delta_T)]


def tail_shift(run: TrainedRun) -> float:
    """The mean of −Δ over a run's sampled tokens in the tail, nats."""
    nats_T, delta_T = tokens(run)
    return mean(-delta_T[nats_T >= TAIL_FROM])


def tail_over_head(run: TrainedRun) -> float:
    """Powers of ten by which a run's mean |Δ| in the tail exceeds that in the head."""
    nats_T, delta_T = tokens(run)
    tail, head = (log10(mean(np.abs(delta_T[part]))) for part in (nats_T >= TAIL_FROM, nats_T < SAMPLED_HEAD_BELOW))
    return float(tail - head)


Number = Callable[[TrainedRun], float]

LOGARITHMS: dict[str, Number] = {
    "tail_over_head": tail_over_head,
    "highest_masked_k3": lambda run: float(log10(np.fmax.reduce(stretches(run, keys.K3_MASKED)))),
    "mean_k3": lambda run: float(log10(mean(run.metric(keys.K3_UNMASKED)))),
    "k3_growth": growth,
    "k1_growth": lambda run: growth(run, keys.K1_UNMASKED),
    "seconds": lambda run: float(log10(mean(run.metric(keys.STEP_SECONDS)))),
}
"""Numbers as powers of ten, whose effect is a geometric mean over runs."""

NUMBERS: dict[str, Number] = LOGARITHMS | {
    "tail_shift": tail_shift,
    "skew": lambda run: mean(np.sum([run.metric(part) for part in SKEWED], axis=0)),
    "bias_bound": lambda run: mean(run.metric(keys.BIAS_BOUND)),
    "lost_mass": lambda run: mean(run.metric(keys.LOST_MASS)),
    "tokens_left_out": lambda run: mean(run.metric(keys.LENGTH) * (1 - run.metric(keys.KEPT_MASS_TRAIN))),
}
"""All numbers by their names in the catalogue."""


def numbers(results: Results, arm: str, name: str) -> FloatArray:
    """A number of each run of an arm, (S,)."""
    return np.array([NUMBERS[name](run) for run in results.runs[arm]])


def scores(results: Results, arm: str) -> FloatArray:
    """Held-out avg@k of each run of an arm, (S,), as a share of 1."""
    return np.array([score.avg_at_k for score in results.evaluations[arm].scores])
