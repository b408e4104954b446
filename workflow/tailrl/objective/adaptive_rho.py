"""The safe set's threshold for each response: fixed, or adapted, which the DVP paper leaves to future work.

- `budget` holds the bias budget of Prop. 5.5 at a target. |J_mp − J| is at most the range of the reward times
  E[Σ_t (1 − Z_t)], which every step measures. Then ln ρ moves by gain × error, with error = ln(target / measured).
  Where the lost mass grows as ρⁿ, a step multiplies the error by 1 − gain n. A gain of ½ settles for n < 4. It
  oscillates where the mass falls more steeply, as where many tokens share one probability. n is unknown and
  drifts with the policy, so the gain adapts (Kesten's rule of stochastic approximation): a large error that changed
  its sign halves it, one that did not grows it a little, up to ½. Growing follows a target that moves. Errors within
  the tolerance leave the gain alone.
- `difficulty` prunes more where a prompt is solved: ln ρ is linear between `rho` (never solved when last seen) and
  `rho_easy` (always solved). A hard prompt may need rare tokens; to an easy one they bring only mismatch. A prompt not
  seen yet counts as the average one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tailrl.config.vocabulary import Vocabulary, log_rho

LARGEST_GAIN, SMALLEST_GAIN = 0.5, 2.0**-8
HALVE, GROW = 0.5, 1.15
"""Factors of the gain. Such slow growth settles also at a jump, where one side's error is eight times the other's:
seven steps back for each step forth make 1.15⁷ / 4 < 1."""
TOLERANCE = 0.5  # nats; smaller errors count as sampling noise
LARGEST_ERROR = 4.0
NOTHING_LOST = 2.0  # the error of a step that lost no mass: ρ is then too small to measure
LOWEST_LOG_RHO = -60.0  # below it nothing is pruned in float32


class Thresholds:
    """The thresholds of a run; only `observe` changes its state."""

    def __init__(self, vocabulary: Vocabulary, vocabulary_size: int) -> None:
        self.vocabulary = vocabulary
        self.threshold = vocabulary.threshold(vocabulary_size)
        self.easy = log_rho(vocabulary.easy, vocabulary_size) if vocabulary.easy else 0.0
        self.solved: dict[int, float] = {}
        self.gain = LARGEST_GAIN
        self.error = 0.0

    def of(self, problem: int) -> float:
        """The threshold (ln ρ, k or p) for responses to a problem."""
        if self.vocabulary.easy is None:
            return self.threshold
        average = sum(self.solved.values()) / len(self.solved) if self.solved else 0.0
        return self.threshold + self.solved.get(problem, average) * (self.easy - self.threshold)

    def observe(self, problems: Sequence[int], mean_rewards: Sequence[float], lost_mass: float) -> None:
        """Adapt to a step: its problems, the mean reward (0 to 1) of each, and E[Σ_t (1 − Z_t)] per response."""
        self.solved.update(zip(problems, mean_rewards, strict=True))
        if self.vocabulary.target is not None:
            error = math.log(self.vocabulary.target / lost_mass) if lost_mass > 0 else NOTHING_LOST
            error = min(LARGEST_ERROR, max(-LARGEST_ERROR, error))
            if abs(error) > TOLERANCE:
                factor = HALVE if error * self.error < 0 else GROW
                self.gain = min(LARGEST_GAIN, max(SMALLEST_GAIN, self.gain * factor))
            self.error = error
            self.threshold = min(0.0, max(LOWEST_LOG_RHO, self.threshold + self.gain * error))

    def state(self) -> dict[str, Any]:
        """Everything that `observe` changes, for JSON, which keeps floats to the bit."""
        return {
            "threshold": self.threshold,
            "gain": self.gain,
            "error": self.error,
            "solved": [[problem, share] for problem, share in self.solved.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, with the order of `solved`, in which its average is summed."""
        self.threshold, self.gain, self.error = state["threshold"], state["gain"], state["error"]
        self.solved = dict(state["solved"])
