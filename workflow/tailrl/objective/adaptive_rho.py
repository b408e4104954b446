"""Which threshold the safe set's rule has for each response: fixed, or adapted as the paper's future work asks.

- `budget` holds the bias budget of Prop. 5.5 at a target. |J_mp − J| is at most the range of the reward times
  E[Σ_t (1 − Z_t)], which every step measures; ln ρ then moves by gain × error, error = ln(target / measured).
  Where the lost mass grows as a power n of ρ, that multiplies the error by 1 − gain n: a gain of ½ settles where n < 4,
  and swings for ever where the mass falls more steeply, as where many tokens share one probability. n is not known
  and drifts with the policy, but it shows: while the error is large, the gain halves when the error has changed its
  sign (too far) and grows a little, up to ½, when it has not (too slow). Kesten's rule of stochastic
  approximation, with a way back for a target that moves; sampling noise within the tolerance does not touch the gain.
- `difficulty` prunes more where a prompt is solved: ln ρ runs linearly from `rho` (never solved when last seen) to
  `rho_easy` (always solved). A hard prompt may need rare tokens; an easy one has only mismatch to gain from them.
  A prompt not seen yet counts as the average one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tailrl.config.arm import Vocabulary, log_rho

LARGEST_GAIN, SMALLEST_GAIN = 0.5, 2.0**-8
HALVE, GROW = 0.5, 1.15
"""What the gain is multiplied by. Growth this slow also settles at a jump, where one side's error is eight times the
other's: seven steps back for one step forth make 1.15⁷ / 4 < 1."""
TOLERANCE = 0.5
"""Nats: errors below it are taken for sampling noise."""
LARGEST_ERROR = 4.0
NOTHING_LOST = 2.0
"""The error that a step counts as which lost no mass at all: it says only that ρ is too small to measure."""
LOWEST_LOG_RHO = -60.0
"""Below it nothing is pruned in float32."""


class Thresholds:
    """The thresholds of a run; its state changes with `observe` alone."""

    def __init__(self, vocabulary: Vocabulary, vocabulary_size: int) -> None:
        self.vocabulary = vocabulary
        self.threshold = vocabulary.threshold(vocabulary_size)
        self.easy = log_rho(vocabulary.rho_easy, vocabulary_size) if vocabulary.rho_easy else 0.0
        self.solved: dict[int, float] = {}
        self.gain = LARGEST_GAIN
        self.error = 0.0

    def of(self, problem: int) -> float:
        """The number of the rule (ln ρ, k or p) for the responses to a problem."""
        if self.vocabulary.adapt != "difficulty":
            return self.threshold
        average = sum(self.solved.values()) / len(self.solved) if self.solved else 0.0
        return self.threshold + self.solved.get(problem, average) * (self.easy - self.threshold)

    def observe(self, problems: Sequence[int], mean_rewards: Sequence[float], lost_mass: float) -> None:
        """Take in a step: its problems, the mean reward (0 to 1) of each, and E[Σ_t (1 − Z_t)] per response."""
        self.solved.update(zip(problems, mean_rewards, strict=True))
        if self.vocabulary.budget is not None:
            error = math.log(self.vocabulary.budget / lost_mass) if lost_mass > 0 else NOTHING_LOST
            error = min(LARGEST_ERROR, max(-LARGEST_ERROR, error))
            if abs(error) > TOLERANCE:
                factor = HALVE if error * self.error < 0 else GROW
                self.gain = min(LARGEST_GAIN, max(SMALLEST_GAIN, self.gain * factor))
            self.error = error
            self.threshold = min(0.0, max(LOWEST_LOG_RHO, self.threshold + self.gain * error))

    def state(self) -> dict[str, Any]:
        """Everything that `observe` changes, ready for JSON, which gives every float back to the bit."""
        return {
            "threshold": self.threshold,
            "gain": self.gain,
            "error": self.error,
            "solved": [[problem, share] for problem, share in self.solved.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; the order of `solved` too, in which its average is summed."""
        self.threshold, self.gain, self.error = state["threshold"], state["gain"], state["error"]
        self.solved = dict(state["solved"])
