"""How sure causes are: the model of shapes and the hit rates of checks, as `make diagnose-exam` settled them."""

import math
from collections.abc import Collection, Mapping
from functools import cache

import numpy as np

from tailrl.artifacts.files import Record
from tailrl.diagnosis.features import FEATURES, quantile
from tailrl.diagnosis.signals import Signals
from tailrl.runtime.data_files import yaml_beside

MOST_CUT = 3.0  # standard deviations at which a number is cut before the model sees it


class Sure(Record):
    """How sure causes are: hit rates of the checks, and the model of the others.

    Attributes:
        command: what wrote this. penalty, factor: see exams/diagnose/rules.py.
        checks: of each fault of a log, the share of right findings, by Laplace's rule. places: the same of each cause
            that a place tells (where.yaml), and of a penalty that is told by the signs of Δ.
        sixteen_bits: nats, the largest median of |Δ|/(1 − p) of a log whose engine and trainer have 16 bits.
        few_tokens: so many tokens halve how sure a cause is.
        mean, scale: of each feature. weights: of each cause, or of each `cause/part`, one a feature, and the constant.
    """

    command: str
    penalty: float
    factor: float
    checks: dict[str, float]
    places: dict[str, float]
    sixteen_bits: float
    few_tokens: float
    mean: dict[str, float]
    scale: dict[str, float]
    weights: dict[str, dict[str, float]]


@cache
def settled() -> Sure:
    """How sure causes are, as the exam settled it."""
    return Sure.model_validate(yaml_beside(__file__, "sure.yaml"))


def beyond_sixteen_bits(signals: Signals) -> bool:
    """Whether the median of |Δ|/(1 − p) is above what formats of 16 bits gave on logs of known cause."""
    return bool(signals.sums.get("tokens")) and 10 ** quantile(signals.sizes, 0.5) > settled().sixteen_bits


def shapes(found: Mapping[str, float], without: Collection[str] = ()) -> dict[str, float]:
    """The probability of each cause that the shape of a mismatch tells, from `features`; `without`: ruled out."""
    sure = settled()
    cut = {
        name: float(np.clip((found[name] - sure.mean[name]) / sure.scale[name], -MOST_CUT, MOST_CUT))
        for name in FEATURES
    }
    odds: dict[str, float] = {}
    for column, weights in sure.weights.items():
        cause = column.partition("/")[0]
        if cause in without:
            continue
        own = math.exp(weights["constant"] + sum(weights[name] * cut[name] for name in FEATURES))
        odds[cause] = odds.get(cause, 0.0) + own
    return {cause: value / sum(odds.values()) for cause, value in odds.items()}
