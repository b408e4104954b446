"""Alarms on a run's metrics.

`alarm_step` compares a metric with the run's own start, for `stop_when`.
`RunAlarms` has those of `tailrl watch`, which are told while a run goes on and change nothing in it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from tailrl.tracking.metrics import (
    CLIPPED,
    CORR_UNMASKED,
    CORR_VERL,
    K3_UNMASKED,
    LEARNING_RATE,
    METRICS,
    REWARD,
    SKEW_NEGATIVE,
    SKEW_POSITIVE,
    STEP,
    in_group,
)
from tailrl.watch.alarms import Alarm, Alarms, Step

START, FEWEST = 0.1, 5
"""A run's own level is the mean over this share of its first steps, and over at least so many steps."""

WINDOW = 5
"""Steps of the trailing mean that is compared with this level."""

SKEW = "c_skew"
"""|C(r)|, summed over tokens of either sign of the advantage: 0 if the mismatch does not depend on that sign."""

SKEWED = (SKEW_POSITIVE, SKEW_NEGATIVE)
"""The two parts of it."""

SIGNALS = (*METRICS, SKEW)
"""What can raise an alarm."""


def signal(metrics: Mapping[str, float | None], name: str) -> float:
    """The size of one of SIGNALS at a step, from its metrics; NaN where the step did not record it (null)."""
    keys = SKEWED if name == SKEW else (name,)
    values = [metrics.get(key) for key in keys]
    return abs(math.fsum(math.nan if value is None else value for value in values))


def start_steps(steps: int) -> int:
    """How many steps a run's own level is the mean of; `steps` are those of the whole run, as planned."""
    return max(FEWEST, math.ceil(START * steps))


def alarm_step(values_N: Sequence[float] | ArrayLike, factor: float, start: int) -> int | None:
    """The first step, from 0, at which a signal's trailing mean over WINDOW steps is beyond `factor` times its level.

    Beyond means above for a factor over 1, and below for a factor under 1. Steps that recorded nothing are left out.
    A level of 0 raises no alarm.

    Args:
        values_N: (N,), the signal at each step until now.
        factor: positive, not 1.
        start: the level is the mean of so many first steps; none of them raises an alarm.
    """
    values = np.asarray(values_N, dtype=np.float64)
    known = ~np.isnan(values[:start])
    limit = factor * float(values[:start][known].mean()) if known.any() else 0.0
    if values.size <= start or not limit:
        return None
    totals, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.nan_to_num(values), ~np.isnan(values)))
    end_M = np.arange(start, values.size) + 1
    first_M = np.maximum(end_M - WINDOW, 0)
    count_M = counts[end_M] - counts[first_M]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_M = (totals[end_M] - totals[first_M]) / count_M
    beyond_M = (mean_M > limit) if factor > 1 else (mean_M < limit)
    return int(end_M[np.argmax(beyond_M)]) - 1 if beyond_M.any() else None


OF_STEP = {
    "mean_abs": in_group(CORR_UNMASKED, "delta_abs_mean"),
    "k3": K3_UNMASKED,
    "ess": in_group(CORR_VERL, "rollout_is_eff_sample_size"),
    "learning_rate": LEARNING_RATE,
    "reward": REWARD,
    "clip": CLIPPED,
}
"""The metric that is each number of a step."""


class RunAlarms:
    """The alarms of `tailrl watch` on a run's own metrics; each is told once a run."""

    def __init__(
        self, *, clips: bool, lag: float, exact: bool, steps: Iterable[Mapping[str, float | None]] = ()
    ) -> None:
        """Args:
        clips: whether the run's loss has a ratio that may be clipped.
        lag: age of the engine's weights, steps.
        exact: whether the engine computes with the trainer's own bits.
        steps: those that the run has recorded already.
        """
        self._clips = clips
        self._lag = lag
        self._alarms = Alarms(exact=exact)
        self._told: set[str] = set()
        for metrics in steps:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """The alarms of the next step that were not told before."""
        numbers = {name: metrics.get(key) for name, key in OF_STEP.items() if name != "clip" or self._clips}
        known = {name: float(value) for name, value in numbers.items() if value is not None}
        raised = self._alarms.step(Step(number=float(metrics[STEP] or 0.0), lag=self._lag, **known))  # type: ignore[arg-type]
        new = [alarm for alarm in raised if alarm.name not in self._told]
        self._told |= {alarm.name for alarm in new}
        return new
