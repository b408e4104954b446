"""Which threshold the safe set's rule has for each response: fixed, or adapted as the paper's future work asks.

- `budget` holds the bias budget of Prop. 5.5 at a target. |J_mp − J| is at most the range of the reward times
  E[Σ_t (1 − Z_t)], which every step measures; after each step ln ρ moves by half of ln(target / measured). The lost
  mass grows about as a power of ρ, so this settles in a few steps, and follows the policy's entropy as it falls.
- `difficulty` prunes more where a prompt is solved: ln ρ runs linearly from `rho` (never solved when last seen) to
  `rho_easy` (always solved). A hard prompt may need rare tokens; an easy one has only mismatch to gain from them.
  A prompt not seen yet counts as the average one.
"""

import math
from collections.abc import Sequence

from tailrl.settings import Vocabulary, log_rho

STEP = 0.5
LOWEST_LOG_RHO = -60.0
"""Below it nothing is pruned in float32."""


class Thresholds:
    """The thresholds of a run; its state changes with `observe` alone."""

    def __init__(self, vocabulary: Vocabulary, vocabulary_size: int) -> None:
        self.vocabulary = vocabulary
        self.threshold = vocabulary.threshold(vocabulary_size)
        self.easy = log_rho(vocabulary.rho_easy, vocabulary_size) if vocabulary.rho_easy else 0.0
        self.solved: dict[int, float] = {}

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
            # A step that lost nothing says only that ρ is too small to measure: raise it by a fixed factor, e.
            change = STEP * math.log(self.vocabulary.budget / lost_mass) if lost_mass > 0 else 1.0
            self.threshold = min(0.0, max(LOWEST_LOG_RHO, self.threshold + max(-2.0, min(2.0, change))))
