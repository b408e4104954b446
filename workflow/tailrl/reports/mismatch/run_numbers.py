"""The numbers that claims on trained arms are measured by, one per run."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.config.distributions import SAMPLED_HEAD_BELOW, TAIL_FROM
from tailrl.stats.intervals import Interval, known_mean
from tailrl.stats.tests import Difference
from tailrl.tracking import metrics as keys

PART = 0.1
"""The length of a run's start, its end and each stretch, as a share of its steps."""

_POWERS = 14.0
"""Logarithms are clipped to ± this, so that zeros (below rounding) and overflows count as numbers."""

EXACT_LOGARITHMS = 0.0, -_POWERS, _POWERS
"""Logarithms that no other seed would change: the clipped ones, and the ratio of two of them."""


def log10(values: ArrayLike) -> FloatArray:
    """The decimal logarithm, clipped to ± _POWERS."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(values), -_POWERS, _POWERS)


def powers(logs: Difference) -> Interval:
    """The geometric mean with its interval, from those of decimal logarithms."""
    with np.errstate(over="ignore"):
        middle, low, high = (float(np.float64(10.0) ** end) for end in (logs.mean, logs.low, logs.high))
    return Interval(middle, low, high, logs.n)


def stretches(run: TrainedRun, key: str) -> list[float]:
    """A metric's means over stretches of a tenth of the run's steps; NaN for a stretch without values."""
    values_N = run.metric(key)
    size = math.ceil(PART * values_N.size)
    return [known_mean(values_N[start : start + size]) for start in range(0, values_N.size, size)]


def first_and_last(run: TrainedRun, key: str) -> tuple[float, float]:
    """A metric's means over the first and the last tenth of the run's steps."""
    values_N = run.metric(key)
    size = math.ceil(PART * values_N.size)
    return known_mean(values_N[:size]), known_mean(values_N[-size:])


def growth(run: TrainedRun, key: str = keys.K3_UNMASKED) -> float:
    """Powers of ten by which the size of a run's metric grows from the first tenth of its steps to the last."""
    first, last = np.abs(first_and_last(run, key))
    return float(log10(last) - log10(first))


def tokens(run: TrainedRun) -> tuple[FloatArray, FloatArray]:
    """-ln π_train and Δ of a run's sampled tokens, nats, without tokens whose Δ is not finite."""
    delta_T = run.tokens.logp_trainer_T - run.tokens.logp_sampler_T
    return -run.tokens.logp_trainer_T[np.isfinite(delta_T)], delta_T[np.isfinite(delta_T)]


def tail_shift(run: TrainedRun) -> float:
    """The mean of −Δ over a run's sampled tokens in the tail, nats."""
    nats_T, delta_T = tokens(run)
    return known_mean(-delta_T[nats_T >= TAIL_FROM])


def tail_over_head(run: TrainedRun) -> float:
    """Powers of ten by which a run's mean |Δ| in the tail exceeds that in the head."""
    nats_T, delta_T = tokens(run)
    tail = log10(known_mean(np.abs(delta_T[nats_T >= TAIL_FROM])))
    head = log10(known_mean(np.abs(delta_T[nats_T < SAMPLED_HEAD_BELOW])))
    return float(tail - head)


Number = Callable[[TrainedRun], float]

LOGARITHMS: dict[str, Number] = {
    "tail_over_head": tail_over_head,
    "highest_masked_k3": lambda run: float(log10(np.fmax.reduce(stretches(run, keys.K3_MASKED)))),
    "mean_k3": lambda run: float(log10(known_mean(run.metric(keys.K3_UNMASKED)))),
    "k3_growth": growth,
    "k1_growth": lambda run: growth(run, keys.K1_UNMASKED),
    "seconds": lambda run: float(log10(known_mean(run.metric(keys.STEP_SECONDS)))),
}
"""Numbers as powers of ten, whose effect is a geometric mean over runs."""

NUMBERS: dict[str, Number] = LOGARITHMS | {
    "tail_shift": tail_shift,
    "skew": lambda run: known_mean(np.sum([run.metric(part) for part in keys.SKEWED], axis=0)),
    "bias_bound": lambda run: known_mean(run.metric(keys.BIAS_BOUND)),
    "lost_mass": lambda run: known_mean(run.metric(keys.LOST_MASS)),
    "tokens_left_out": lambda run: known_mean(run.metric(keys.LENGTH) * (1 - run.metric(keys.KEPT_MASS_TRAIN))),
}
"""All numbers by their names in the catalogue."""


def numbers(results: Results, arm: str, name: str) -> FloatArray:
    """A number of each run of an arm, (S,)."""
    return np.array([NUMBERS[name](run) for run in results.runs[arm]])
