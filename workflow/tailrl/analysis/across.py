"""The results of the arms that several studies share, study by study."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrl.analysis.format import LOST
from tailrl.analysis.tables import mean_of
from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results
from tailrl.config.study import Study
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, arm_difference, holm
from tailrl.tracking import metrics as keys


def _gain(results: Results, arm: str) -> FloatArray:
    base = results.base.scores[0].avg_at_k
    return 100 * np.array([score.avg_at_k - base for score in results.evaluations[arm].scores])


def _metric(key: str) -> Callable[[Results, str], FloatArray]:
    return lambda results, arm: mean_of(results.runs[arm], key)


GAIN = "gain over base, points"

QUANTITIES: dict[str, Callable[[Results, str], FloatArray]] = {
    GAIN: _gain,
    LOST: lambda results, arm: 1 - mean_of(results.runs[arm], keys.KEPT_MASS_TRAIN),
    "1 − Z of a response, summed": _metric(keys.LOST_MASS),
    "outside": _metric(keys.OUTSIDE),
    "k3 masked, nats": _metric(keys.K3_MASKED),
    "k3 unmasked, nats": _metric(keys.K3_UNMASKED),
    "|Δ| of a response, nats": _metric(keys.DELTA_SEQUENCE_UNMASKED),
    "effective sample size of the responses' weights": _metric(keys.SAMPLE_SIZE_RAW),
}
"""The compared quantities, one number per seed; for a metric its mean over the run."""


@dataclass(frozen=True, slots=True)
class ArmQuantity:
    """One quantity of one arm in one study, with its t interval over seeds.

    Attributes:
        change: against the first study, Welch over seeds; NaN in the first study, and where all seeds of both agree.
        change_p_holm: the change's p by Holm over the quantity's arms and studies.
    """

    quantity: str
    arm: str
    study: str
    value: Interval
    change: Difference
    change_p_holm: float


def arm_quantities(
    name: str, arms: Sequence[str], studies: Sequence[Study], read: Sequence[Results]
) -> list[ArmQuantity]:
    """One quantity of every arm in every study, arm by arm."""
    found = []
    for arm in arms:
        first_S, *_ = values = [QUANTITIES[name](results, arm) for results in read]
        for study, value_S in zip(studies, values, strict=True):
            # Constants are not compared, such as naive's mass outside the safe set.
            varies = np.ptp(np.concatenate([value_S, first_S])) > 0
            change = arm_difference(value_S, first_S) if value_S is not first_S and varies else NO_DIFFERENCE
            found.append((arm, study.name, mean_interval(value_S), change))
    adjusted = holm([change.p for *_, change in found]).tolist()
    return [ArmQuantity(name, *one, p) for one, p in zip(found, adjusted, strict=True)]
