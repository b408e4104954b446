"""Runs and rollouts for the tests of an update: small settings, and responses that no engine made."""

from typing import Any

import numpy as np

from tailrl.records import Rollout
from tailrl.settings import Run
from tailrl.study import parse_study
from tailrl.training.step import Sample

# The random policy is nearly uniform: only a large ρ prunes anything. With this one 4 of the 63 tokens of
# `make_rollouts` lie outside the set, in 3 of the 7 responses.
RHO = 0.22
DVP = {"rule": "min_p", "rho": RHO}
STEPS, PROMPTS, GROUP = 3, 2, 4


def run_of(arm: dict[str, Any], name: str = "test", **training: Any) -> Run:
    """The run of one arm, with training settings that override the small ones here."""
    sizes = {
        "steps": STEPS,
        "prompts": PROMPTS,
        "group_size": GROUP,
        "max_new_tokens": 8,
        "token_budget": 60,
        "learning_rate": 1e-3,
    }
    settings = {**sizes, "temperature": 0.8, "keep_tokens_every": 2, "warmup_steps": 1, **training}
    return parse_study({"name": "test", "arms": {name: arm}, "training": settings}).run(name)


def make_rollouts(count: int = 7) -> tuple[list[Rollout], list[float]]:
    """Random tokens with log-probs near a uniform sampler's, and advantages; some lie outside the safe set."""
    rng = np.random.default_rng(2)
    rollouts = []
    for length in rng.integers(1, 20, count):
        floats = [-6.4 + 0.3 * rng.standard_normal(length), -0.3 * rng.random(length)]
        logp, log_kept = (values.astype(np.float32) for values in floats)
        kept = rng.integers(100, 500, length).astype(np.int32)
        prompt, tokens = (tuple(rng.integers(2, 600, n).tolist()) for n in (rng.integers(1, 9), length))
        rollouts.append(Rollout(prompt, tokens, logp, log_kept, kept, stopped=True))
    return rollouts, rng.normal(size=count).tolist()


def samples_of(rollouts: list[Rollout], advantages: list[float], run: Run) -> list[Sample]:
    """The rollouts as the trainer sees them, all with the run's own threshold, each with a seed of its own."""
    threshold = run.vocabulary.threshold(600)
    pairs = zip(rollouts, advantages, strict=True)
    return [Sample(rollout, advantage, threshold, 1000 + i) for i, (rollout, advantage) in enumerate(pairs)]
