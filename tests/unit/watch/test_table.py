"""A step's numbers from its tokens, against plain sums over them in float64."""

import math

import numpy as np
import pytest

from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.watch.table import TokenTable


def rows(count: int = 40, seed: int = 5, lag: float = 0.0) -> list[LoggedRow]:
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(random.integers(5, 60))
        sampler_T = -random.exponential(0.8, length)
        trainer_T = np.minimum(sampler_T + random.normal(0, 0.3, length) * random.standard_t(2, length), 0.0)
        reward = float(random.random() < 0.5)
        made.append(
            LoggedRow(
                where=str(number),
                sampler_T=sampler_T,
                trainer_T=trainer_T,
                token_T=random.integers(0, 900, length),
                advantage_T=np.full(length, 2.0 * reward - 0.7 + 0.01 * number),
                reward=reward,
                step=9.0,
                version=9.0 - lag,
            )
        )
    return made


def table(made: list[LoggedRow], prompts: list[int] | None = None, parts: int = 1) -> TokenTable:
    found = TokenTable()
    for part in range(parts):
        chosen = list(range(part, len(made), parts))
        prompt_S = None if prompts is None else np.array([prompts[i] for i in chosen], np.int64)
        found.add(pack([made[i] for i in chosen]), prompt_S)
    return found


def joined(made: list[LoggedRow]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([row.trainer_T for row in made]), np.concatenate([row.sampler_T for row in made])


@pytest.mark.parametrize("parts", [1, 3])
def test_sums_and_counts(parts: int):
    made = rows()
    step = table(made, parts=parts).as_step(9)
    trainer_T, sampler_T = joined(made)
    delta_T = trainer_T - sampler_T
    assert (step.number, step.tokens, step.responses, step.lag) == (9, len(delta_T), 40, 0)
    assert step.mean_abs == pytest.approx(np.abs(delta_T).mean(), rel=1e-12)
    assert step.k3 == pytest.approx((np.exp(delta_T) - 1 - delta_T).mean(), rel=1e-9)
    ratio_T = np.exp(delta_T)
    assert step.ess == pytest.approx(ratio_T.sum() ** 2 / (len(ratio_T) * (ratio_T**2).sum()), rel=1e-12)
    assert step.tail == (np.abs(delta_T) > 1).sum()
    assert step.outside == pytest.approx(((ratio_T < 0.8) | (ratio_T > 1.2)).mean(), rel=1e-12)
    p, q = np.exp(trainer_T), np.exp(sampler_T)
    confident = ((p >= 0.5) & (q < p * math.exp(-2))) | ((q >= 0.5) & (p < q * math.exp(-2)))
    assert step.confident == confident.sum() > 0
    rest_T = 1 - np.exp((trainer_T + sampler_T) / 2)
    scaled_T = np.sort((np.abs(delta_T) / rest_T)[rest_T > 0.001])
    assert step.level == pytest.approx(scaled_T[math.ceil(len(scaled_T) / 2) - 1], rel=0.006)


def test_the_floor_is_of_the_least_lag_with_a_tenth_of_the_tokens():
    fresh, stale, few = rows(20, 1), rows(20, 2, lag=2.0), rows(1, 3, lag=0.0)
    step = table([*fresh, *stale]).as_step(9)
    assert (step.lag, step.version) == (0, 9)
    assert step.floor_tokens == sum(len(row.sampler_T) for row in fresh)
    assert table([*few, *stale]).as_step(9).lag == 2
    unknown = [LoggedRow(where="", sampler_T=row.sampler_T, trainer_T=row.trainer_T) for row in fresh]
    step = table(unknown).as_step(9)
    assert math.isnan(step.lag) and step.floor_tokens == step.tokens > 0


def test_responses_of_later_weights_are_counted():
    step = table([*rows(3), *rows(2, 4, lag=-3.0)]).as_step(9)
    assert (step.ahead, step.ahead_by) == (2, 3)
    assert math.isnan(table([LoggedRow("", row.sampler_T, row.trainer_T) for row in rows(3)]).as_step(9).ahead)


def test_equal_and_unsound_tokens_are_counted():
    sampler_T = np.array([-1.0, -2.0, -0.0001, np.nan, 0.3, -np.inf])
    trainer_T = np.array([-1.0, -2.5, -0.0001, -1.0, -1.0, -1.0])
    step = table([LoggedRow("", sampler_T, trainer_T)]).as_step(0)
    assert (step.unsure, step.equal, step.unsound) == (2, 1, 0.5)


def test_advantages_against_rewards_are_of_single_prompts():
    made = rows()
    prompts = [1 + number // 8 for number in range(40)]
    step = table(made, prompts, parts=3).as_step(9)
    slopes, advantages = [], []
    for prompt in range(1, 6):
        those = [row for row, of in zip(made, prompts, strict=True) if of == prompt]
        reward = np.array([row.reward for row in those])
        advantage = np.array([row.advantage_T[0] for row in those])
        if reward.std():
            slopes.append(np.polyfit(reward, advantage, 1)[0])
            advantages.append(advantage)
    every = np.concatenate(advantages)
    assert step.slope == pytest.approx(np.median(slopes), rel=1e-9)
    assert step.shift == pytest.approx(abs(every.mean()) / np.sqrt((every**2).mean()), rel=1e-9)
    assert math.isnan(step.correlation)
    assert step.reward == pytest.approx(np.mean([row.reward for row in made]))


def test_without_prompts_there_is_a_correlation():
    made = rows()
    step = table(made).as_step(9)
    pairs = np.array([(row.reward, row.advantage_T[0]) for row in made])
    assert step.correlation == pytest.approx(np.corrcoef(pairs.T)[0, 1], rel=1e-9)
    assert math.isnan(step.slope)


def test_responses_that_are_all_the_same():
    made = [row for row in rows(3) for _ in range(4)]
    step = table(made, [1 + number // 4 for number in range(12)]).as_step(9)
    assert step.alike_prompts == 3
    assert step.alike_nats == pytest.approx(sum(-3 * row.sampler_T.sum() for row in made[::4]), rel=1e-12)
    others = [*rows(2, 7), *rows(2, 8)]
    other = table([*made, *others], [1 + number // 4 for number in range(12)] + [9, 9, 8, 8]).as_step(9)
    assert other.alike_prompts == 0


def test_the_same_responses_have_the_same_digests_in_any_number_format():
    made = rows(4)
    halved = [LoggedRow(row.where, row.sampler_T.astype(np.float32), row.trainer_T, row.token_T) for row in made]
    assert table(made).as_step(9).replies == table(halved).as_step(9).replies
    assert len(table(made).as_step(9).replies) == 4


def test_a_step_without_sound_tokens_says_so():
    step = table([LoggedRow("", np.array([1.0, 2.0]), np.array([1.5, 2.5]))]).as_step(0)
    assert (step.tokens, step.unsound) == (0, 1.0)
    assert math.isnan(step.level) and math.isnan(step.ess)
