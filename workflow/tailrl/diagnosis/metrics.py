"""The mismatch numbers of a log under each framework's own names, with intervals over sequences and rules of thumb."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from pydantic import Field

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.measure import TOKEN, Measured
from tailrl.runtime.data_files import yaml_beside
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.verl import bounded_ratio, effective_sample_size

SIGNED = ("k1", "logp_train", "logp_infer")  # of TOKEN: the others are never below 0
TRL_CAP = 3.0  # TRL's default of vllm_importance_sampling_clip_max


class Rule(Record):
    """What a framework calls normal: at least `least`, at most `most` in size; `source` is its document.

    `every`: whether it is meant for every engine, and not for a deterministic one alone.
    """

    least: float | None = None
    most: float | None = None
    words: str
    source: str
    every: bool = True

    def holds(self, value: float) -> bool:
        """Whether a value is within the rule."""
        return abs(value) <= (self.most or math.inf) and value >= (-math.inf if self.least is None else self.least)

    def sentence(self) -> str:
        """The rule in words, such as "healthy is at least 0.5 and at most 2"."""
        ends = (("at least", self.least), ("at most", self.most))
        limits = " and ".join(f"{side} {end:g}" for side, end in ends if end is not None)
        return f"{self.words} is {limits}"


class Known(Record):
    """A framework's metric: which quantity of ours it is, under which of its settings, and its rules of thumb."""

    of: str
    settings: str = ""
    rules: list[Rule] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Named:
    """A metric of a framework with its value in this log.

    Attributes:
        of: which quantity of ours it is.
        settings: those of the framework that the value depends on; the log does not have them.
    """

    framework: str
    name: str
    of: str
    settings: str
    value: Interval
    rules: tuple[Rule, ...]

    @property
    def judged(self) -> list[tuple[Rule, bool]]:
        """Each rule with whether the value is within it; none without a value."""
        return [] if math.isnan(self.value.mean) else [(rule, rule.holds(self.value.mean)) for rule in self.rules]


@cache
def frameworks() -> dict[str, dict[str, Known]]:
    """The metrics of each framework by its name."""
    return {
        framework: {name: Known.model_validate(known) for name, known in metrics.items()}
        for framework, metrics in yaml_beside(__file__, "frameworks.yaml").items()
    }


def named_metrics(measured: Measured) -> list[Named]:
    """Every framework's metrics of a log, in the order of `frameworks.yaml`."""
    return [
        Named(framework, name, known.of, known.settings, quantity(measured, known.of), tuple(known.rules))
        for framework, metrics in frameworks().items()
        for name, known in metrics.items()
    ]


@np.errstate(over="ignore", invalid="ignore")
def quantity(measured: Measured, name: str) -> Interval:
    """One of our quantities: a mean over tokens (TOKEN), an extreme, or one of OTHERS. Extremes have no interval."""
    if not measured.tokens:
        return Interval(math.nan, math.nan, math.nan, 0)
    if name in TOKEN:
        mean = measured.token_mean(name)
        return mean if name in SIGNED else from_zero(mean)
    if name in measured.extremes:
        return _plain(measured, measured.extremes[name])
    return OTHERS[name](measured)


def from_zero(interval: Interval) -> Interval:
    """The interval of a mean of numbers that are never below 0."""
    return replace(interval, low=float(np.maximum(interval.low, 0.0)))  # NaN stays NaN


def _plain(measured: Measured, value: float) -> Interval:
    return Interval(value, math.nan, math.nan, measured.sequences)


def _shifted(interval: Interval, by: float) -> Interval:
    return Interval(interval.mean + by, interval.low + by, interval.high + by, interval.n)


def _ess(measured: Measured, weight: str) -> Interval:
    """Effective sample size of token weights, as a fraction."""
    mean = measured.token_mean(weight).mean
    mean_square = measured.token_mean(f"{weight}_squared").mean
    return _plain(measured, effective_sample_size(mean, mean_square))


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
    return mean_interval(bounded_ratio(whole_S) ** 2 - 1)


def _trl_ratios(measured: Measured) -> FloatArray:
    """TRL's importance ratio of each response [S], by its defaults: π_train/π_infer of all tokens, 0 above the cap."""
    ratio_S = np.exp(-measured.column("k1"))
    return np.where(ratio_S > TRL_CAP, 0.0, ratio_S)


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
    "trl_ratio_min": lambda measured: _plain(measured, float(_trl_ratios(measured).min())),
    "trl_ratio_mean": lambda measured: mean_interval(_trl_ratios(measured)),
    "trl_ratio_max": lambda measured: _plain(measured, float(_trl_ratios(measured).max())),
    "ess_token": lambda measured: _ess(measured, "ratio"),
    "ess_truncated": lambda measured: _ess(measured, "truncated"),
    "ess_seq": _sequence_ess,
    "training_ppl": _mean_of("logp_train", lambda mean_S: np.exp(-mean_S)),
    "rollout_ppl": _mean_of("logp_infer", lambda mean_S: np.exp(-mean_S)),
    "ppl_ratio": _mean_of("k1", np.exp),
    "log_ppl_abs_diff": _mean_of("k1", np.abs),
    "response_abs_logp": _mean_of("abs_logp", lambda mean_S: mean_S),
}
