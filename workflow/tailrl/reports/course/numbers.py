"""What each run was like: rewards by step, routing flips, responses, its course in tenths, the time of its phases."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrl.artifacts.results import Results, TrainedRun
from tailrl.artifacts.tables import Row
from tailrl.artifacts.tokens import Tokens
from tailrl.stats.intervals import known_mean
from tailrl.tracking.metrics import (
    CURRICULUM_LEVEL,
    DELTA_SEQUENCE_UNMASKED,
    ENTROPY,
    K3_MASKED,
    K3_UNMASKED,
    KEPT_MASS_TRAIN,
    LENGTH,
    LOST_MASS,
    MASKED_TOKENS,
    OUTSIDE,
    PHASES,
    REJECTED,
    REWARD,
    ROUTING,
    SAMPLE_SIZE_RAW,
    STEP,
    STEP_SECONDS,
    TIME,
    VETOED,
    in_group,
)

STRETCHES = 10
"""The stretches into which the table of a run's course divides it."""


def reward_rows(results: Results) -> Iterator[Row]:
    """The mean reward of each step of each run, which the count of collapses is made of."""
    for run in results.all_runs():
        for step, reward in zip(run.metric(STEP), run.metric(REWARD), strict=True):
            yield {"arm": run.arm, "seed": run.seed, "step": int(step), "reward": float(reward)}


def flip_rows(results: Results) -> Iterator[Row]:
    """The means over steps of the metrics `routing/*`, a row for each run of a mixture that has routes."""
    for run in results.all_runs():
        if ROUTING.keys() <= run.metrics.keys():
            means = {key.partition("/")[2]: known_mean(run.metric(key)) for key in ROUTING}
            yield {"arm": run.arm, "seed": run.seed, **means}


@dataclass(frozen=True, slots=True)
class ResponseMeans:
    """What a run's responses are like, as means over its steps; NaN where not recorded.

    Attributes:
        tokens: the length of a response.
        delta_abs: |Δ_y| of a response, unmasked, nats.
        delta_sd: the standard deviation of Δ_y over the responses of all kept steps, unmasked, nats.
        sample_size: effective sample size of the weights e^Δ_y, as a share of the responses.
        level: of the curriculum, in the last step.
        rejected, vetoed: the shares of responses that a weight's bound or a rejection drops, and that the veto drops.
        masked, outside: the shares of tokens that a correction masks, and that lie outside the trainer's safe set.
        lost, lost_of_response: the mass outside the trainer's safe set, of a token, and summed over a response.
        k3_masked, k3_unmasked: of the masked and of the full policies, nats.
    """

    arm: str
    seed: int
    tokens: float
    delta_abs: float
    delta_sd: float
    sample_size: float
    level: float
    rejected: float
    vetoed: float
    masked: float
    outside: float
    lost: float
    lost_of_response: float
    k3_masked: float
    k3_unmasked: float


def response_means(results: Results) -> Iterator[ResponseMeans]:
    """A record for each run, arm by arm."""
    for run in results.all_runs():
        yield ResponseMeans(
            arm=run.arm,
            seed=run.seed,
            tokens=known_mean(run.metric(LENGTH)),
            delta_abs=known_mean(run.metric(DELTA_SEQUENCE_UNMASKED)),
            delta_sd=_delta_sd(run.tokens),
            sample_size=known_mean(run.metric(SAMPLE_SIZE_RAW)),
            level=float(run.metric(CURRICULUM_LEVEL)[-1]),
            rejected=known_mean(run.metric(REJECTED)),
            vetoed=known_mean(run.metric(VETOED)),
            masked=known_mean(run.metric(MASKED_TOKENS)),
            outside=known_mean(run.metric(OUTSIDE)),
            lost=1 - known_mean(run.metric(KEPT_MASS_TRAIN)),
            lost_of_response=known_mean(run.metric(LOST_MASS)),
            k3_masked=known_mean(run.metric(K3_MASKED)),
            k3_unmasked=known_mean(run.metric(K3_UNMASKED)),
        )


def _delta_sd(tokens: Tokens) -> float:
    """Without responses whose Δ_y is not finite; NaN with fewer than two."""
    with np.errstate(invalid="ignore"):
        delta_R = np.bincount(tokens.responses(), tokens.logp_trainer_T - tokens.logp_sampler_T)
    delta_R = delta_R[np.isfinite(delta_R)]
    return float(delta_R.std(ddof=1)) if delta_R.size > 1 else math.nan


@dataclass(frozen=True, slots=True)
class RunStretch:
    """A stretch of a run's course, with means over its steps; NaN where not recorded.

    Attributes:
        first_step, last_step: both belong to it; steps count from 0.
        reward: the mean reward.
        k3: of the full policies, nats.
        entropy: nats.
        sample_size: effective sample size of the weights e^Δ_y, as a share of the responses.
        level: of the curriculum.
    """

    arm: str
    seed: int
    first_step: int
    last_step: int
    reward: float
    k3: float
    entropy: float
    sample_size: float
    level: float


def course(results: Results) -> Iterator[RunStretch]:
    """Each tenth of each run, arm by arm; each step where a run has fewer than ten."""
    keys = REWARD, K3_UNMASKED, ENTROPY, SAMPLE_SIZE_RAW, CURRICULUM_LEVEL
    for run in results.all_runs():
        step_N = run.metric(STEP)
        for own in np.array_split(np.arange(step_N.size), min(STRETCHES, step_N.size)):
            means = (known_mean(run.metric(key)[own]) for key in keys)
            yield RunStretch(run.arm, run.seed, int(step_N[own[0]]), int(step_N[own[-1]]), *means)


@dataclass(frozen=True, slots=True)
class TimeShare:
    """One phase's share of an arm's step time, and its seconds per step."""

    arm: str
    phase: str
    share: float
    seconds: float


def time_shares(runs: Sequence[TrainedRun]) -> list[TimeShare]:
    """Every phase of one arm over all steps and seeds; a phase that was never timed is part of `other`."""
    total_N = np.concatenate([run.metric(STEP_SECONDS) for run in runs])
    total, steps = float(np.nansum(total_N)), int((~np.isnan(total_N)).sum())
    if total == 0:
        return [TimeShare(runs[0].arm, phase, math.nan, math.nan) for phase in (*PHASES, "other")]
    phase_seconds = {
        phase: float(sum(np.nansum(run.metric(in_group(TIME, phase))) for run in runs)) for phase in PHASES
    }
    phase_seconds["other"] = max(0.0, total - sum(phase_seconds.values()))
    whole = sum(phase_seconds.values())
    return [TimeShare(runs[0].arm, phase, spent / whole, spent / steps) for phase, spent in phase_seconds.items()]
