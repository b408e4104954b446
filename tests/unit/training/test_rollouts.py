"""What a step samples: its problems, its requests, and their rewards."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training.rollouts import problem_order, rewards, step_requests


def test_every_problem_once_an_epoch() -> None:
    order = problem_order(10, 3, seed=1)
    epochs = [[i for _ in range(3) for i in next(order)] for _ in range(3)]
    assert all(len(set(epoch)) == 9 and set(epoch) < set(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    again, other = problem_order(10, 3, seed=1), problem_order(10, 3, seed=2)
    assert next(again) == epochs[0][:3] != next(other)
    with pytest.raises(StudyError, match=r"training\.prompts: 11 different problems a step, but the task has 10"):
        next(problem_order(10, 11, seed=1))


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
