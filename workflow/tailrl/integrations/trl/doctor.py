"""The alarms of `tailrl watch` inside TRL's trainers: judged on each sampled batch, in the trainer's own log."""

import dataclasses
import json
import math
from collections.abc import Collection
from typing import Any, cast

import numpy as np
from accelerate.utils import gather_object

from tailrl.diagnosis.tables import read_table
from tailrl.integrations.trl.log import RowsMixin
from tailrl.runtime.errors import say
from tailrl.watch.alarms import Alarms, Step, check_names, numbers_of
from tailrl.watch.table import TokenTable, digest

LOGGED = ("level", "mean_abs", "k3", "ess", "outside", "lag")
"""The numbers of `Step` that go into TRL's log, as `tailrl/<name>`."""


def with_doctor(trainer: type, exact: bool = False, without: Collection[str] = ()) -> Any:
    """A subclass of GRPOTrainer, or of what `with_dvp` or `with_log` made, that raises alarms while it trains.

    TRL's log gets `tailrl/alarms`, the number of alarms of a batch, `tailrl/alarm/<name>` where one is raised, and the
    numbers that they judge. The main process prints an alarm in words, with what to do, when it was not raised by the
    batch before.

    Args:
        trainer: the class.
        exact: the engine computes with the trainer's own bits.
        without: names of alarms that stay silent.

    Raises:
        StudyError: at once for a name of no alarm; at the first batch, if it lacks one side's log-probs.
    """
    check_names(without)

    def alarms() -> Alarms:
        return Alarms(exact, without)

    fields = {"make_alarms": staticmethod(alarms), "__doc__": trainer.__doc__}
    return type(f"Watched{trainer.__name__}", (DoctorMixin, trainer), fields)


class DoctorMixin(RowsMixin):
    """A base class to go before one of TRL's trainers, as `with_doctor` puts it."""

    make_alarms: Any
    _alarms: Alarms | None = None
    _raised_before: frozenset[str] = frozenset()

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        super()._take_rows(rows)
        trainer = cast(Any, self)
        self._alarms = self._alarms or self.make_alarms()
        rate = trainer._get_learning_rate() if trainer.lr_scheduler is not None else math.nan
        step = dataclasses.replace(
            step_of(gather_object(rows), trainer.state.global_step), learning_rate=rate, reward=_last_reward(trainer)
        )
        raised = self._alarms.step(step)
        numbers = numbers_of(step)
        logged = {name: float(numbers[name]) for name in LOGGED if name in numbers}
        logged |= {"alarms": float(len(raised))} | {f"alarm/{alarm.name}": 1.0 for alarm in raised}
        for name, value in logged.items():
            trainer._metrics["train"][f"tailrl/{name}"].append(value)
        if trainer.accelerator.is_main_process:
            for alarm in raised:
                if alarm.name not in self._raised_before:
                    say(f"step {alarm.step:g}: ALARM {alarm.name}: {alarm.says}. {alarm.do}")
        self._raised_before = frozenset(alarm.name for alarm in raised)


def step_of(rows: list[dict[str, Any]], number: int) -> Step:
    """A step's numbers, from the rows of its responses in the plain schema."""
    table = TokenTable()
    # A row whose tokens are all masked is no part of a log.
    rows = [row for row in rows if any(row.get("mask", row["token_ids"]))]
    prompts = [digest(json.dumps(row["prompt"]).encode()) for row in rows]
    taken = 0
    for _, log in read_table(rows) if rows else ():
        count = len(log.start_S)
        table.add(log, np.array(prompts[taken : taken + count], np.int64))
        taken += count
    return table.as_step(number)


def _last_reward(trainer: Any) -> float:
    """The mean reward of the batch, which TRL has just noted; NaN where it notes none."""
    values = trainer._metrics["train"].get("reward") or [math.nan]
    return float(values[-1])
