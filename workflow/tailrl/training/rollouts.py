"""What a step samples: its problems, the requests to the engine, rewards, and the gathering of all ranks' responses."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem
from tailrl.tasks.scoring import score


def problem_order(count: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Indices of each step's problems: a problem at most once an epoch, in an order by the seed."""
    if per_step > count:
        raise StudyError(f"training.prompts: {per_step} different problems a step, but the task has {count}")
    epoch = 0
    while True:
        order = np.random.default_rng(derive_seed("problems", seed, epoch)).permutation(count)
        for start in range(0, count - per_step + 1, per_step):
            yield [int(i) for i in order[start : start + per_step]]
        epoch += 1


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
    """1 for a right answer, else 0, for each rollout: float32."""
    texts = tokenizer.batch_decode([rollout.tokens for rollout in rollouts], skip_special_tokens=True)
    pairs = zip(texts, problems, strict=True)
    return np.array([score(text, problem.answer, problem.compared) for text, problem in pairs], dtype=np.float32)


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
