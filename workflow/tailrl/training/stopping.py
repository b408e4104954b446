"""Early end of a run: the rule `training.stop_when`, followed step by step."""

from collections.abc import Iterable, Mapping

from tailrl.config.training import Training
from tailrl.tracking.alarm import WINDOW, alarm_step, signal, start_steps


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
