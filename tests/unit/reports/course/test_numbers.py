"""What each run was like."""

import math
from dataclasses import replace

import numpy as np
import pytest
from claims_fixture import NAIVE, made, results_of
from claims_fixture import run_of_metrics as run

from tailrl.artifacts.tokens import Tokens
from tailrl.reports.course.numbers import course, flip_rows, response_means, time_shares
from tailrl.tracking.metrics import (
    CURRICULUM_LEVEL,
    DELTA_SEQUENCE_UNMASKED,
    ENTROPY,
    LENGTH,
    MASKED_TOKENS,
    OUTSIDE,
    REJECTED,
    REWARD,
    ROUTING,
    SAMPLE_SIZE_RAW,
    STEP,
    VETOED,
)

NAN = math.nan
LOST = REJECTED, VETOED, MASKED_TOKENS, OUTSIDE


def test_flips_are_means_over_a_run_that_has_routes() -> None:
    both = results_of(mixed=made(NAIVE, reward=[0.5]), dense=made(NAIVE, reward=[0.5]))
    (mixed,) = both.runs["mixed"]
    routes = {key: np.array([0.1, math.nan, 0.3]) for key in ROUTING}
    routes["routing/flipped_k3_kl"] = np.full(3, math.nan)
    (row,) = flip_rows(
        replace(both, runs={**both.runs, "mixed": (replace(mixed, metrics={**mixed.metrics, **routes}),)})
    )
    assert (row.pop("arm"), row.pop("seed")) == ("mixed", 0)
    assert math.isnan(float(str(row.pop("flipped_k3_kl"))))
    assert len(row) == len(ROUTING) - 1 and set(row.values()) == {0.2}


def test_responses_are_summed_over_their_tokens_and_averaged_over_a_run() -> None:
    rng = np.random.default_rng(0)
    step_T, sequence_T = rng.integers(0, 3, 200).astype(np.int32), rng.integers(0, 5, 200).astype(np.int32)
    trainer_T, sampler_T = -rng.exponential(size=(2, 200))
    metrics = {
        STEP: [0.0, 1.0],
        CURRICULUM_LEVEL: [0.0, 2.0],
        LENGTH: [10.0, 14.0],
        DELTA_SEQUENCE_UNMASKED: [0.5, NAN],
        SAMPLE_SIZE_RAW: [0.2, 0.4],
        **{key: [share, 0.0] for key, share in zip(LOST, (0.2, 0.4, 0.6, 0.8), strict=True)},
    }
    one = run(metrics, 3, Tokens(step_T, trainer_T, sampler_T, sequence_T))
    both = results_of(mixed=made(NAIVE, reward=[0.5]))
    (found,) = response_means(replace(both, arms=("arm",), runs={"arm": (one,)}))
    sums = dict.fromkeys(set(zip(step_T.tolist(), sequence_T.tolist(), strict=True)), 0.0)
    for step, sequence, train, infer in zip(step_T, sequence_T, trainer_T, sampler_T, strict=True):
        sums[int(step), int(sequence)] += train - infer
    assert (found.arm, found.seed, found.tokens, found.delta_abs) == ("arm", 3, 12.0, 0.5)
    assert found.level == 2.0
    assert found.sample_size == pytest.approx(0.3)
    assert (found.rejected, found.vetoed, found.masked, found.outside) == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert found.delta_sd == pytest.approx(float(np.std(list(sums.values()), ddof=1)))


def test_the_course_of_a_run_in_tenths() -> None:
    """23 steps are three stretches of three and seven of two; fewer than ten steps are a stretch each."""
    reward_N = [float(n) ** 2 for n in range(23)]
    long = run({STEP: [*map(float, range(23))], REWARD: reward_N, ENTROPY: [NAN] * 3 + [0.5] * 20}, seed=3)
    short = run({STEP: [0.0, 1.0], REWARD: [0.25, 0.75], CURRICULUM_LEVEL: [0.0, 1.0]})
    both = results_of(mixed=made(NAIVE, reward=[0.5]))
    found = list(course(replace(both, arms=("long", "short"), runs={"long": (long,), "short": (short,)})))
    ends = [(0, 2), (3, 5), (6, 8), *((first, first + 1) for first in range(9, 23, 2))]
    assert [(one.first_step, one.last_step) for one in found] == [*ends, (0, 0), (1, 1)]
    assert [one.reward for one in found[:10]] == pytest.approx([np.mean(reward_N[a : b + 1]) for a, b in ends])
    assert math.isnan(found[0].entropy) and {one.entropy for one in found[1:10]} == {0.5}
    assert [(one.arm, one.seed, one.reward, one.level) for one in found[10:]] == [
        *(("arm", 0, 0.25, 0.0), ("arm", 0, 0.75, 1.0))
    ]
    assert all(math.isnan(one.k3) and math.isnan(one.sample_size) for one in found)


def test_a_response_whose_delta_is_not_finite_has_no_part_in_its_spread() -> None:
    sampler_T = np.array([-1.0, -2.0, -math.inf, -5.0])
    tokens = Tokens(np.zeros(4, dtype=np.int32), np.full(4, -1.0), sampler_T, np.arange(4, dtype=np.int32))
    both = results_of(mixed=made(NAIVE, reward=[0.5]))
    (found,) = response_means(replace(both, arms=("arm",), runs={"arm": (run({STEP: [0.0]}, 0, tokens),)}))
    assert found.delta_sd == pytest.approx(np.std([0.0, 1.0, 4.0], ddof=1))
    assert math.isnan(found.tokens) and math.isnan(found.level) and math.isnan(found.sample_size)
    (alone,) = response_means(replace(both, arms=("arm",), runs={"arm": (run({STEP: [0.0]}),)}))
    assert math.isnan(alone.delta_sd)


def test_time_shares() -> None:
    runs = [run({"train/step": [0, 1], "time/step": [2, 2], "time/rollout": [1, 1], "time/backward": [0.5, NAN]})]
    found = {share.phase: share for share in time_shares(runs)}
    assert found["rollout"].share == pytest.approx(0.5)
    assert found["rollout"].seconds == pytest.approx(1.0)
    assert found["backward"].share == pytest.approx(0.125)
    assert found["other"].share == pytest.approx(0.375)
    assert sum(share.share for share in found.values()) == pytest.approx(1)
    assert sum(share.seconds for share in found.values()) == pytest.approx(2)


def test_unrecorded_or_overlapping_time() -> None:
    assert all(math.isnan(share.share) for share in time_shares([run({"train/step": [0]})]))
    overlap = time_shares([run({"train/step": [0], "time/step": [1], "time/rollout": [1], "time/forward": [1]})])
    assert sum(share.share for share in overlap) == pytest.approx(1)
