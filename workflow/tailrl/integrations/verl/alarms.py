"""The alarms of `tailrl watch` and its table by lag, from each step's own batch, for verl's console and tracking."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailrl.diagnosis.lags import LagsAndDepths
from tailrl.integrations.verl.log import Batch, packed
from tailrl.watch.alarms import Alarms
from tailrl.watch.files import told_by
from tailrl.watch.follow import Judged, Open, text_lines
from tailrl.watch.table import digest

BY_LAG = ("responses", "tokens", "mean_abs", "p99_abs", "ess")
"""Columns of the table by lag that become metrics."""

AT_ONCE = 64
"""Responses that are copied at once, so that memory does not grow with the batch."""


class Watching:
    """Follows a run from within: takes a step's responses as they come, and judges the step at its end."""

    def __init__(self) -> None:
        self._alarms = Alarms()
        self._raised: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._step, self._lags = Open(), LagsAndDepths()

    def add(self, batch: Batch, indices: Sequence[int], step: int) -> None:
        """Adds responses of the step; a step of several updates has several parts."""
        for first in range(0, len(indices), AT_ONCE):
            part = indices[first : first + AT_ONCE]
            log = packed(batch, part, step)
            prompt_S = np.array([digest(batch.columns["prompts"][i].numpy().tobytes()) for i in part], np.int64)
            self._step.table.add(log, prompt_S)
            self._lags.add(log)

    def end(self, step: int, metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
        """Judges the step.

        Args:
            step: its number.
            metrics: verl's of the step; a learning rate, a clip's share and what is NaN are known from them.

        Returns:
            Metrics under `tailrl/`: `alarms`, how many were raised; `alarm/NAME` of each, 1; `lag/ROW/...`. And lines
            for the console where an alarm was raised.
        """
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float | np.number)}
        self._step.numbers, self._step.not_finite = told_by(numbers)
        judged_step = self._step.as_step(step)
        judged = Judged(judged_step, tuple(self._alarms.step(judged_step)))
        values = {"tailrl/alarms": float(len(judged.alarms))}
        values |= {f"tailrl/alarm/{alarm.name}": 1.0 for alarm in judged.alarms}
        for row in self._lags.lags():
            name = row.name.replace(" ", "_")
            values |= {f"tailrl/lag/{name}/{column}": float(getattr(row.sizes, column)) for column in BY_LAG}
        lines = list(text_lines(judged, self._raised)) if judged.alarms else []
        self._raised = {alarm.name for alarm in judged.alarms}
        self._begin()
        return values, lines
