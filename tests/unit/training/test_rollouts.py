"""What a step samples: its problems, its requests, and their rewards."""

import json
from typing import Any

import numpy as np
import pytest
from step_fixture import run_of
from transformers import PreTrainedTokenizerFast

from tailrl.config.curriculum import Curriculum
from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.tracking.metrics import CURRICULUM_LEVEL, REWARD
from tailrl.training.rollouts import ProblemOrder, problem_order, rewards, step_requests


def test_every_problem_once_an_epoch() -> None:
    order = problem_order(10, 3, seed=1)
    epochs = [[i for _ in range(3) for i in next(order)] for _ in range(3)]
    assert all(len(set(epoch)) == 9 and set(epoch) < set(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    again, other = problem_order(10, 3, seed=1), problem_order(10, 3, seed=2)
    assert next(again) == epochs[0][:3] != next(other)
    with pytest.raises(StudyError, match=r"training\.prompts: 11 different problems a step, but the task has 10"):
        next(problem_order(10, 11, seed=1))


HARDER = {"harder": [{"name": "arithmetic"}, {"name": "arithmetic", "terms": [3, 4]}], "above": 0.75, "window": 3}
PROBLEMS = [Problem(str(i), "p", "1", level=level) for i, level in enumerate([0] * 7 + [1] * 5 + [2] * 9)]


def posed(
    rewards: list[float], seed: int = 5, curriculum: dict[str, Any] | None = HARDER
) -> tuple[list[Any], list[Any]]:
    """The problems of each step, and of the next one; and the level of each step."""
    run = run_of({}, prompts=3).model_copy(update={"curriculum": curriculum and Curriculum.model_validate(curriculum)})
    order = ProblemOrder(PROBLEMS if curriculum else PROBLEMS[:7], run, seed, [])
    chosen, levels = [], []
    for reward in rewards:
        chosen.append(order.next())
        levels.append(order.see({REWARD: reward}).get(CURRICULUM_LEVEL))
    return [*chosen, order.next()], levels


def test_without_a_curriculum_the_order_is_that_of_the_seed() -> None:
    expected = problem_order(7, 3, seed=5)
    chosen, levels = posed([1.0] * 9, curriculum=None)
    assert chosen == [next(expected) for _ in range(10)] and levels == [None] * 9


def test_a_harder_task_follows_where_the_last_rewards_are_high() -> None:
    """Three steps of one task with a mean of 0.75; rewards of an easier task do not count, and nothing goes back."""
    rewards = [1.0, 0.0, 0.5, 1.0, 0.75, 1.0, 1.0, 0.25, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    expected = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    chosen, levels = posed(rewards)
    assert levels == expected
    for problems, level in zip(chosen, [*expected, 2], strict=True):
        assert len(set(problems)) == 3 and {PROBLEMS[i].level for i in problems} == {level}


def test_each_task_of_a_curriculum_has_an_order_of_its_own_which_the_seed_alone_decides() -> None:
    fast, slow = posed([1.0] * 9)[0], posed([0.0] * 4 + [1.0] * 9)[0]
    assert fast[3:6] == slow[7:10] and fast[6:9] == slow[10:13]
    assert posed([1.0] * 9, seed=6)[0] != fast
    assert fast[:3] == slow[:3] == posed([1.0] * 3, curriculum=None)[0][:3]


def test_a_resumed_order_goes_on_from_the_recorded_rewards() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.choice([0.5, 0.875, 1.0], 30).tolist()
    run = run_of({}, prompts=3).model_copy(update={"curriculum": Curriculum.model_validate(HARDER)})
    whole, levels = posed(rewards)
    assert set(levels) == {0, 1, 2}
    for done in range(31):
        steps = [json.loads(json.dumps({REWARD: reward})) for reward in rewards[:done]]
        order = ProblemOrder(PROBLEMS, run, 5, steps)
        for reward, expected in zip(rewards[done:], whole[done:], strict=False):
            assert order.next() == expected
            order.see({REWARD: reward})


def test_a_level_with_fewer_problems_than_a_step_needs() -> None:
    run = run_of({}, prompts=6).model_copy(update={"curriculum": Curriculum.model_validate(HARDER)})
    order = ProblemOrder(PROBLEMS, run, 5, [])
    for _ in range(3):
        order.next()
        order.see({REWARD: 1.0})
    with pytest.raises(StudyError, match="6 different problems a step, but the task has 5"):
        order.next()


def test_every_response_has_its_own_random_stream() -> None:
    requests = [r for step in (0, 1) for r in step_requests([(1, 2), (3,)], [-1.0, -2.0], 3, seed=4, step=step)]
    assert [r.threshold for r in requests] == ([-1.0] * 3 + [-2.0] * 3) * 2
    assert [r.prompt_tokens for r in requests] == [(1, 2)] * 3 + [(3,)] * 3 + [(1, 2)] * 3 + [(3,)] * 3
    assert len({r.seed for r in requests}) == 12


def test_rewards(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["1+2=3,\\boxed{3}<end>", "\\boxed{4}<end>", "<end>", "\\boxed{-3}"]
    nothing = np.zeros(0, np.float32)
    rollouts = [Rollout((1,), tuple(tokenizer.encode(t)), nothing, nothing, nothing, True) for t in texts]  # type: ignore[arg-type]
    problems = [Problem("p", "p", answer) for answer in ("3", "3", "3", "-3")]
    found = rewards(rollouts, problems, tokenizer)
    assert found.tolist() == [1.0, 0.0, 0.0, 1.0] and found.dtype == np.float32
    as_text = [Problem("p", "p", answer, compared="text") for answer in ("3", "4", "", "- 3")]
    assert rewards(rollouts, as_text, tokenizer).tolist() == [1.0, 1.0, 0.0, 0.0]
