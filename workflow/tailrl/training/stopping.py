"""Early end of a run: the rule `training.stop_when`, followed step by step."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from tailrl.config.training import Training
from tailrl.tracking.metrics import SKEW, SKEWED

START, FEWEST = 0.1, 5
"""A run's own level is the mean over this share of its first steps, and over at least so many steps."""

WINDOW = 5
"""Steps of the trailing mean that is compared with this level."""


def signal(metrics: Mapping[str, float | None], name: str) -> float:
    """The size of one of `metrics.SIGNALS` at a step, from its metrics; NaN where the step did not record it (null)."""
    keys = SKEWED if name == SKEW else (name,)
    values = [metrics.get(key) for key in keys]
    return abs(math.fsum(math.nan if value is None else value for value in values))


def start_steps(steps: int) -> int:
    """How many first steps make a run's own level. `steps`: how many the whole run is planned to have."""
    return max(FEWEST, math.ceil(START * steps))


def alarm_step(values_N: Sequence[float] | ArrayLike, factor: float, start: int) -> int | None:
    """The first step, from 0, at which a signal's trailing mean over WINDOW steps is beyond `factor` times its level.

    Beyond means above for a factor over 1, and below for a factor under 1. Steps that recorded nothing are left out.
    A level of 0 raises no alarm.

    Args:
        values_N: (N,), the signal at each step until now.
        factor: positive, not 1.
        start: the level is the mean of so many first steps. None of these steps raises an alarm.
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


class Watch:
    """Follows one metric of a run; it depends on the recorded steps alone, so a resumed run ends at the same step."""

    def __init__(self, settings: Training, steps: Iterable[Mapping[str, float | None]]) -> None:
        """Follow a run of these settings, from the steps that it has already recorded."""
        self._rule = settings.stop_when
        self._start = start_steps(settings.steps)
        self._values: list[float] = []
        self._at: int | None = None
        for metrics in steps:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float | None]) -> None:
        """Take the metrics of the next step."""
        if self._rule is not None and self._at is None:
            self._values.append(signal(metrics, self._rule.metric))
            self._at = alarm_step(self._values, self._rule.factor, self._start)

    def alarm(self) -> str | None:
        """Why the run ends, in one sentence; None while it goes on."""
        if self._rule is None or self._at is None:
            return None
        side = "above" if self._rule.factor > 1 else "below"
        return (
            f"the run ends after step {self._at}: {self._rule.metric}, as a mean over {WINDOW} steps, is {side} "
            f"{self._rule.factor:g} times its mean over the first {self._start}"
        )
