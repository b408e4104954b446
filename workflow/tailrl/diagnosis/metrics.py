"""The mismatch numbers of a log under each framework's own names, with intervals over sequences and rules of thumb."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from pydantic import Field

from tailrl.artifacts.files import Record
from tailrl.diagnosis.measure import TOKEN, Measured
from tailrl.stats.intervals import Interval, mean_interval

MOST_LOG_RATIO = 20.0
"""Nats: verl clamps log-ratios to it before it exponentiates them."""


class Rule(Record):
    """What a framework calls normal: at least `least`, at most `most` in size; `source` is its document."""

    least: float | None = None
    most: float | None = None
    words: str
    source: str

    def holds(self, value: float) -> bool:
        """Whether a value is within the rule."""
        return abs(value) <= (self.most or math.inf) and value >= (-math.inf if self.least is None else self.least)


class Known(Record):
    """A framework's metric: which quantity of ours it is, and its rules of thumb."""

    of: str
    rules: list[Rule] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Named:
    """A metric of a framework with its value in this log; `of`: which quantity of ours it is."""

    framework: str
    name: str
    of: str
    value: Interval
    rules: tuple[Rule, ...]


@cache
def frameworks() -> dict[str, dict[str, Known]]:
    """The metrics of each framework by its name."""
    text = Path(__file__).with_name("frameworks.yaml").read_text(encoding="utf-8")
    return {
        framework: {name: Known.model_validate(known) for name, known in metrics.items()}
        for framework, metrics in yaml.safe_load(text).items()
    }


def named_metrics(measured: Measured) -> list[Named]:
    """Every framework's metrics of a log, in the order of `frameworks.yaml`."""
    return [
        Named(framework, name, known.of, quantity(measured, known.of), tuple(known.rules))
        for framework, metrics in frameworks().items()
        for name, known in metrics.items()
    ]


@np.errstate(over="ignore", invalid="ignore")
def quantity(measured: Measured, name: str) -> Interval:
    """One of our quantities: a mean over tokens (TOKEN), an extreme, or one of OTHERS. Extremes have no interval."""
    if not measured.tokens:
        return Interval(math.nan, math.nan, math.nan, 0)
    if name in TOKEN:
        return measured.token_mean(name)
    if name in measured.extremes:
        return _plain(measured, measured.extremes[name])
    return OTHERS[name](measured)


def _plain(measured: Measured, value: float) -> Interval:
    return Interval(value, math.nan, math.nan, measured.sequences)


def _shifted(interval: Interval, by: float) -> Interval:
    return Interval(interval.mean + by, interval.low + by, interval.high + by, interval.n)


def _ess(measured: Measured, weight: str) -> Interval:
    """Effective sample size of token weights, as a fraction: (mean w)² / mean w²."""
    mean, squared = (measured.token_mean(name).mean for name in (weight, f"{weight}_squared"))
    # Weights too small for a float have no size left to compare.
    return _plain(measured, mean**2 / squared if squared > 0 else math.nan)


def _deviation(measured: Measured) -> Interval:
    """The sample standard deviation of |π_train − π_infer| over tokens, as verl's torch.std."""
    mean, squared = (measured.token_mean(name).mean for name in ("abs_prob", "abs_prob_squared"))
    tokens = measured.tokens
    return _plain(measured, math.sqrt(max(0.0, squared - mean**2) * tokens / (tokens - 1)) if tokens > 1 else math.nan)


def _pearson(measured: Measured) -> Interval:
    """Pearson's correlation of both probabilities over tokens."""
    names = ("prob_train", "prob_infer", "prob_train_squared", "prob_infer_squared", "prob_product")
    p, q, pp, qq, pq = (measured.token_mean(name).mean for name in names)
    spread = (pp - p * p) * (qq - q * q)
    return _plain(measured, (pq - p * q) / math.sqrt(spread) if spread > 0 else math.nan)


def _mean_of(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Measured], Interval]:
    """The mean over sequences of a function of their mean per token."""
    return lambda measured: measured.sequence_mean(lambda sums: change(sums(name) / sums("tokens")))


def _sequence_chi2(measured: Measured) -> Interval:
    whole_S = -measured.column("k1")[measured.column("tokens") > 0]
    return mean_interval(np.expm1(2 * np.clip(whole_S, -MOST_LOG_RATIO, MOST_LOG_RATIO)))


def _sequence_ess(measured: Measured) -> Interval:
    """Effective sample size of whole responses' ratios, as a fraction; the largest ratio is taken for 1."""
    whole_S = -measured.column("k1")[measured.column("tokens") > 0]
    weight_S = np.exp(whole_S - whole_S.max())
    return _plain(measured, float(weight_S.mean() ** 2 / (weight_S**2).mean()))


OTHERS: dict[str, Callable[[Measured], Interval]] = {
    "abs_prob_std": _deviation,
    "pearson": _pearson,
    "chi2_token": lambda measured: _shifted(measured.token_mean("ratio_squared"), -1.0),
    "chi2_seq": _sequence_chi2,
    "ess_token": lambda measured: _ess(measured, "ratio"),
    "ess_truncated": lambda measured: _ess(measured, "truncated"),
    "ess_seq": _sequence_ess,
    "training_ppl": _mean_of("logp_train", lambda mean_S: np.exp(-mean_S)),
    "rollout_ppl": _mean_of("logp_infer", lambda mean_S: np.exp(-mean_S)),
    "ppl_ratio": _mean_of("k1", np.exp),
    "log_ppl_abs_diff": _mean_of("k1", np.abs),
    "response_abs_logp": _mean_of("abs_logp", lambda mean_S: mean_S),
}
