"""Each estimator's advantages against a loop over the responses."""

import math

import numpy as np
import pytest
import torch

from tailrl.objective.advantages import ESTIMATORS, GRPO_EPSILON, grpo, reinforce, rloo


def some_rewards(group: int) -> list[list[float]]:
    return np.random.default_rng(group).normal(size=(5, group)).tolist()


@pytest.mark.parametrize("group", [2, 3, 8])
def test_rloo_leaves_one_out(group: int) -> None:
    rewards = some_rewards(group)
    expected = [[row[i] - np.mean([row[j] for j in range(group) if j != i]) for i in range(group)] for row in rewards]
    found = rloo(torch.tensor(rewards, dtype=torch.float64))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-12)


def test_rloo_of_equal_rewards_is_exactly_zero() -> None:
    assert (rloo(torch.tensor([[0.0] * 8, [1.0] * 8])) == 0).all()


@pytest.mark.parametrize("group", [2, 3, 8])
def test_reinforce_leaves_one_out_of_the_whole_step(group: int) -> None:
    rewards = some_rewards(group)
    flat = [value for row in rewards for value in row]
    expected = [value - np.mean(flat[:i] + flat[i + 1 :]) for i, value in enumerate(flat)]
    found = reinforce(torch.tensor(rewards, dtype=torch.float64))
    np.testing.assert_allclose(found.flatten(), expected, atol=1e-12)
    assert found.sum().item() == pytest.approx(0, abs=1e-12)


def test_reinforce_tells_prompts_apart_where_rloo_does_not() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(reinforce(rewards), torch.tensor([[2 / 3, 2 / 3], [-2 / 3, -2 / 3]]))
    assert (rloo(rewards) == 0).all() and (grpo(rewards) == 0).all()


@pytest.mark.parametrize("group", [2, 3, 8])
def test_grpo_divides_by_the_standard_deviation_of_the_group(group: int) -> None:
    rewards = some_rewards(group)
    expected = []
    for row in rewards:
        mean = sum(row) / group
        deviation = math.sqrt(sum((value - mean) ** 2 for value in row) / (group - 1))
        expected.append([(value - mean) / (deviation + GRPO_EPSILON) for value in row])
    found = grpo(torch.tensor(rewards, dtype=torch.float64))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.std(1), 1, atol=1e-5)


def test_grpo_of_equal_rewards_is_exactly_zero() -> None:
    assert (grpo(torch.tensor([[0.0] * 8, [1.0] * 8])) == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_constant_added_to_every_reward_changes_nothing(name: str) -> None:
    rewards = torch.tensor(some_rewards(4), dtype=torch.float64)
    torch.testing.assert_close(ESTIMATORS[name](rewards + 3), ESTIMATORS[name](rewards), rtol=0, atol=1e-12)
