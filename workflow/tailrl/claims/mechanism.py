"""More of what the papers claim or leave open: what a veto catches, the divergence, the ratio's conventions, the bound.

As in `claims`: a function a claim, its docstring the primary endpoint, the arms found by their settings.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tailrl.analysis import arm_kinds
from tailrl.artifacts.results import Results
from tailrl.claims.endpoints import UNMASKED, UNMASKED_K1, first_and_last, growth, log10, mean, powers, ratio_of_runs
from tailrl.claims.finding import (
    CLAIMS,
    CONTRADICTED,
    DVP,
    OPEN,
    REPRODUCED,
    UNTESTABLE,
    VEXACT,
    Finding,
    claim,
    interval,
    measured,
    nothing,
    opposite,
)
from tailrl.stats.tests import all_hold, difference_from, one_sided
from tailrl.tracking import metrics as keys
from tailrl.tracking.alarm import SKEWED

__all__ = ["CLAIMS"]

BOUND, LOST = keys.BIAS_BOUND, keys.LOST_MASS

KEPT, LENGTH = keys.KEPT_MASS_TRAIN, keys.LENGTH

BINDS = 0.01
"""A set binds where it leaves out a token of one response in so many: of a hundred."""

FLAT = 2.0
"""k3 stays flat where it ends below so many times its start."""

REWARDS = 1.0
"""The range of the reward, R_max of Prop. 5.5."""


@claim(
    "dvp.veto.catches",
    f"{DVP}, veto",
    unit="share of steps",
    family="veto",
    needs="arm that prunes and has a veto",
)
def veto_catches_outside(results: Results) -> Iterator[Finding]:
    """Of the steps in which a sampled token lay outside the trainer's set, the share in which the veto discarded a
    sequence: all of them, which a single step refutes."""
    for arm in arm_kinds.arms_as(results, arm_kinds.both(arm_kinds.is_pruned, arm_kinds.has_veto)):
        outside = np.concatenate([run.metric(keys.OUTSIDE_COUNT) for run in results.runs[arm]])
        vetoed = np.concatenate([run.metric(keys.VETOED) for run in results.runs[arm]])
        met = (outside > 0) & ~np.isnan(vetoed)
        steps, caught = int(met.sum()), int((met & (vetoed > 0)).sum())
        if not steps:
            yield Finding(
                (arm,), len(results.runs[arm]), math.nan, math.nan, math.nan,
                "no sampled token lay outside the trainer's set", outcome=UNTESTABLE,
            )  # fmt: skip
            continue
        words = f"in {caught} of the {steps} steps with such a token"
        outcome = REPRODUCED if caught == steps else CONTRADICTED
        yield Finding((arm,), len(results.runs[arm]), caught / steps, math.nan, math.nan, words, outcome=outcome)


# --- the divergence ----------------------------------------------------------------------------------


@claim(
    "open.fair_kl",
    OPEN,
    unit="ratio",
    family="fair",
    needs="DVP arm beside a naive arm under the same mismatch",
)
def unmasked_divergence_falls(results: Results) -> Iterator[Finding]:
    """A run's mean unmasked k3 under DVP over that under naive at the same dose, as a ratio of geometric means over
    runs: below 1. Each is over the tokens that the arm itself samples, within the trainer's set: it says what an arm's
    training meets, and nothing of the tail that DVP never samples."""
    for arms in arm_kinds.pairs(results, arm_kinds.both(arm_kinds.is_dvp, arm_kinds.is_mismatched), arm_kinds.is_naive):
        logs = [log10([mean(run.metric(UNMASKED)) for run in results.runs[arm]]) for arm in arms]
        found = ratio_of_runs(arms, logs, "unmasked k3 of {} is {} times that of {}")
        yield opposite(found)


@claim(
    "vexact.b.k3",
    f"{VEXACT}, finding (b)",
    unit="ratio",
    family="conventions",
    needs="arms with clipped ratios of both conventions under the same mismatch",
)
def bypass_shows_what_recompute_hides(results: Results) -> Iterator[Finding]:
    """The growth of a run's unmasked k3 from its first tenth to its last under bypass over that under recompute, as a
    ratio of geometric means over runs: above 1."""
    yield from _grows_more(results, "k3", UNMASKED)


@claim(
    "vexact.b.k1",
    f"{VEXACT}, finding (b)",
    unit="ratio",
    family="conventions",
    needs="arms with clipped ratios of both conventions under the same mismatch",
)
def bypass_shows_k1_too(results: Results) -> Iterator[Finding]:
    """The growth of the size of a run's mean unmasked K1 from its first tenth to its last under bypass over that under
    recompute, as a ratio of geometric means over runs: above 1."""
    yield from _grows_more(results, "K1", UNMASKED_K1)


def _grows_more(results: Results, name: str, key: str) -> Iterator[Finding]:
    bypass = arm_kinds.both(arm_kinds.clips_by("bypass"), arm_kinds.is_mismatched)
    for arms in arm_kinds.pairs(results, bypass, arm_kinds.clips_by("recompute"), apart=("clip.ratio",)):
        logs = [np.array([growth(run, key) for run in results.runs[arm]]) for arm in arms]
        yield ratio_of_runs(arms, logs, f"{name} grows under {{}} {{}} times as much as under {{}}")


@claim(
    "vexact.b.reward",
    f"{VEXACT}, finding (b)",
    unit="reward",
    family="flat",
    needs="arm with a clipped ratio of the recompute convention under a mismatch",
)
def reward_falls_while_flat(results: Results) -> Iterator[Finding]:
    """A run's mean reward over the last tenth of its steps less that over the first tenth, as a mean over runs: below
    0; and its mean unmasked k3 there less than twice as large, as a geometric mean. The effect is the reward's; where
    no run's reward falls there is nothing to test."""
    for arm in arm_kinds.arms_as(results, arm_kinds.both(arm_kinds.clips_by("recompute"), arm_kinds.is_mismatched)):
        change_S = [last - first for first, last in (first_and_last(run, keys.REWARD) for run in results.runs[arm])]
        grown_S = [growth(run) for run in results.runs[arm]]
        reward, times = difference_from(change_S, 0.0), difference_from(grown_S, 0.0)
        fewest = min(reward, times, key=lambda part: part.n)
        if not fewest.n:
            yield nothing((arm,))
            continue
        steep, flat = one_sided(difference_from(grown_S, math.log10(FLAT)))
        up, down = one_sided(reward)
        ends = (reward.mean, reward.low, reward.high)
        k3 = f"k3 ends at {interval(*powers(times))} times its start"
        words = f"the reward changes by {interval(*ends, form='+.3f')}, {k3}"
        found = Finding((arm,), fewest.n, *ends, words, *all_hold((down, up), (flat, steep)))
        if not np.nanmin(change_S) < 0:
            found = Finding((arm,), fewest.n, *ends, f"no run's reward falls; {words}", outcome=UNTESTABLE)
        yield found


@claim(
    "vexact.b.skew",
    f"{VEXACT}, finding (b)",
    unit="advantage",
    family="skew",
    needs="arm with a clipped ratio of the recompute convention under a mismatch",
)
def skewed_by_advantage(results: Results) -> Iterator[Finding]:
    """The mean C(r) = -(r - 1) A over a step's tokens, of r_corr, which is 0 where the mismatch does not know the sign
    of the advantage, as a mean over a run's steps and then over runs: not 0."""
    for arm in arm_kinds.arms_as(results, arm_kinds.both(arm_kinds.clips_by("recompute"), arm_kinds.is_mismatched)):
        skews = [mean(np.sum([run.metric(part) for part in SKEWED], axis=0)) for run in results.runs[arm]]
        skew = difference_from(skews, 0.0)
        ends = (skew.mean, skew.low, skew.high)
        # Either sign is a skew: of two one-sided tests at half the level one has to hold.
        yield measured((arm,), skew, ends, f"mean C(r) is {interval(*ends)}", min(one_sided(skew)), math.nan)


@claim(
    "dvp.prop5_5.bound",
    f"{DVP}, Prop. 5.5",
    unit="reward",
    family="bound",
    needs="DVP arm",
)
def bound_says_something(results: Results) -> Iterator[Finding]:
    """A step's bound T (1 − Z_min) on |J_mp − J|, of its longest response and its smallest kept mass, as a mean over a
    run's steps and then over runs: below 1, the range of the rewards."""
    for arm in arm_kinds.arms_as(results, arm_kinds.is_dvp):
        bounds = [mean(run.metric(BOUND)) for run in results.runs[arm]]
        lost = mean(np.array([mean(run.metric(LOST)) for run in results.runs[arm]]))
        found = _above(arm, bounds, REWARDS, f"the bound is {{}} on average, E[Σ (1 − Z)] {lost:.3g}")
        yield opposite(found)


@claim(
    "open.rho.binds",
    OPEN,
    unit="tokens a response",
    family="binds",
    needs="DVP arm at the paper's ρ",
)
def set_binds(results: Results) -> Iterator[Finding]:
    """Tokens of a response that would lie outside the trainer's set if they were drawn from its full distribution,
    T (1 − Z), of a step's mean length and mean kept mass, as a mean over a run's steps and then over runs: above
    0.01."""
    for arm in arm_kinds.arms_as(results, arm_kinds.both(arm_kinds.is_dvp, arm_kinds.has_papers_rho)):
        lost = [mean(run.metric(LENGTH) * (1 - run.metric(KEPT))) for run in results.runs[arm]]
        yield _above(arm, lost, BINDS, "its set leaves out {} tokens of a response")


def _above(arm: str, level_S: Sequence[float], limit: float, words: str) -> Finding:
    """That the mean of one number a run lies above a limit."""
    level = difference_from(level_S, 0.0)
    ends = (level.mean, level.low, level.high)
    tested = one_sided(difference_from(level_S, limit))
    return measured((arm,), level, ends, words.format(interval(*ends)), *tested)
