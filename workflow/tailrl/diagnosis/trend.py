"""Whether the mismatch changes over the training steps of a log: its last third of the steps against its first."""

from dataclasses import dataclass

import numpy as np

from tailrl.diagnosis.measure import Measured
from tailrl.page_parts.number_text import short
from tailrl.stats.intervals import Ratio, ratio_difference

LEAST_FACTOR = 1.5  # a mean |Δ| that changes by less keeps its size
FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Trend:
    """Mean |Δ| of a token, nats, in the first and the last third of the steps, and the first and the last step."""

    first: float
    last: float
    first_step: float
    last_step: float

    @property
    def grows(self) -> bool:
        """Whether the later mean is the larger one."""
        return self.last > self.first

    def sentence(self) -> str:
        """The change in words."""
        verb = "grows" if self.grows else "falls"
        ends = f"mean |Δ| is {short(self.first)} nats at step {self.first_step:g} and {short(self.last)} at step"
        causes = (
            " Growth fits weights that do not reach the engine, samples that become older, and a policy whose "
            "responses become longer or rarer."
        )
        return f"It {verb} with the steps: {ends} {self.last_step:g}.{causes if self.grows else ''}"


def trend_of(measured: Measured) -> Trend | None:
    """The change over the steps; None where there are few steps, or no change is detected."""
    step_S, tokens_S, size_S = (measured.column(name) for name in ("step", "tokens", "abs_logp"))
    known_S = np.isfinite(step_S) & (tokens_S > 0)
    steps = np.unique(step_S[known_S])
    if len(steps) < FEWEST_STEPS:
        return None
    third = len(steps) // 3
    parts = [known_S & (step_S <= steps[third - 1]), known_S & (step_S >= steps[-third])]
    first, last = (Ratio(size_S[own_S], tokens_S[own_S], np.full(int(own_S.sum()), np.nan)) for own_S in parts)
    change = ratio_difference(first, last)
    means = [float(part.above_T.sum() / part.below_T.sum()) for part in (first, last)]
    is_same = not (change.low > 0 or change.high < 0) or not min(means) > 0
    if is_same or max(means) < LEAST_FACTOR * min(means):
        return None
    return Trend(means[0], means[1], float(steps[0]), float(steps[-1]))
