"""What a step samples: its problems, the requests to the engine, rewards and lengths, and all ranks' responses."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tailrl.config.jobs import Run
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem
from tailrl.tasks.scoring import reward_of
from tailrl.tracking import metrics as keys


def problem_order(count: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Indices of each step's problems: a problem at most once an epoch, in an order by the seed."""
    if per_step > count:
        raise ConfigurationError(f"training.prompts: {per_step} different problems a step, but the task has {count}")
    epoch = 0
    while True:
        order = np.random.default_rng(derive_seed("problems", seed, epoch)).permutation(count)
        for start in range(0, count - per_step + 1, per_step):
            yield [int(i) for i in order[start : start + per_step]]
        epoch += 1


class ProblemOrder:
    """The problems of each step: those of one task, or with a curriculum of the task that the run has reached.

    It depends on the seed and the recorded rewards alone, so a resumed run goes on with the same problems.
    """

    def __init__(
        self, problems: Sequence[Problem], run: Run, seed: int, steps: Iterable[Mapping[str, float | None]]
    ) -> None:
        """The order of a run with these settings, from the steps that it has already recorded."""
        self._curriculum = run.curriculum
        levels = 1 + (len(run.curriculum.harder) if run.curriculum else 0)
        self._places = [[i for i, one in enumerate(problems) if one.level == level] for level in range(levels)]
        # Of one task: the order by the seed itself.
        seeds = [seed, *(derive_seed("level", seed, level) for level in range(1, levels))]
        counts = zip(map(len, self._places), seeds, strict=True)
        self._orders = [problem_order(count, run.training.prompts, own) for count, own in counts]
        self._level = 0
        self._rewards: list[float] = []
        for metrics in steps:
            self.next()
            self.see(metrics)

    def next(self) -> list[int]:
        """The indices of the next step's problems."""
        return [self._places[self._level][i] for i in next(self._orders[self._level])]

    def see(self, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Take the metrics of the step; returns those that a curriculum adds to them."""
        if self._curriculum is None:
            return {}
        told: dict[str, float] = {keys.CURRICULUM_LEVEL: float(self._level)}
        self._rewards.append(metrics[keys.REWARD] or 0.0)
        last = self._rewards[-self._curriculum.window :]
        whole = len(last) == self._curriculum.window and self._level + 1 < len(self._places)
        if whole and math.fsum(last) >= self._curriculum.above * len(last):
            self._level += 1
            self._rewards.clear()
        return told


def step_requests(
    prompts: Sequence[tuple[int, ...]], thresholds: Sequence[float], group_size: int, seed: int, step: int
) -> list[Request]:
    """The requests of a step, `group_size` for each prompt in turn, each with its own random stream."""
    return [
        Request(prompt, derive_seed("rollout", seed, step, position, member), threshold)
        for position, (prompt, threshold) in enumerate(zip(prompts, thresholds, strict=True))
        for member in range(group_size)
    ]


def rewards(
    rollouts: Sequence[Rollout], problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> NDArray[np.float32]:
    """The reward of each rollout, float32: 1 for a right answer, else 0, unless the task has a reward of its own."""
    texts = tokenizer.batch_decode([rollout.tokens for rollout in rollouts], skip_special_tokens=True)
    pairs = zip(texts, problems, strict=True)
    return np.array([reward_of(text, problem) for text, problem in pairs], dtype=np.float32)


def of_all_ranks(
    rollouts: Sequence[Rollout], rewards: NDArray[np.float32], together: int = 1
) -> tuple[list[Rollout], NDArray[np.float32]]:
    """The rollouts of a step and their rewards, in the order of its requests.

    Each rank scores its own responses: a judge with a time limit might decide differently on another rank.

    Args:
        rollouts: of this rank's share of the requests (`distributed.share`).
        rewards: one for each of these rollouts.
        together: ranks with the same share; the first one's counts.
    """
    given = distributed.gathered((rollouts, rewards))[::together]
    return [rollout for own, _ in given for rollout in own], np.concatenate([own for _, own in given])


def reward_metrics(rewards_PG: NDArray[np.float32]) -> dict[str, float]:
    """Reward metrics of P problems with G responses each."""
    means_P = rewards_PG.mean(axis=1)
    return {
        keys.REWARD: float(means_P.mean()),
        keys.ALL_RIGHT: float((means_P == 1).mean()),
        keys.ALL_WRONG: float((means_P == 0).mean()),
    }


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Response lengths in tokens, and the fraction that ended with the end token."""
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        keys.LENGTH: float(np.mean(lengths)),
        keys.LENGTH_MAX: float(max(lengths)),
        keys.STOPPED: float(np.mean([rollout.stopped for rollout in rollouts])),
    }
