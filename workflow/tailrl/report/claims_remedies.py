"""More of what the papers claim or leave open: remedies beside each other, conventions of the ratio, the bias bound.

As in `claims`: a function a claim, its docstring the primary endpoint, the arms found by their settings.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tailrl.alarm import SKEWED
from tailrl.report import roles
from tailrl.report.data import FloatArray, Results
from tailrl.report.endpoints import UNMASKED, first_and_last, growth, log10, mean, powers, scores
from tailrl.report.findings import (
    CLAIMS,
    CONTRADICTED,
    DVP,
    MEASURED,
    OPEN,
    REPRODUCED,
    UNTESTABLE,
    VEXACT,
    Finding,
    claim,
    interval,
    measured,
    nothing,
)
from tailrl.report.statistics import arm_difference, difference_from, one_sided
from tailrl.report.survival import REWARD

__all__ = ["CLAIMS"]

BOUND, LOST = "dvp/bias_bound_paper", "dvp/lost_mass_per_response"

KEPT, LENGTH = "dvp/kept_mass_train_mean", "response/length_mean"

BINDS = 0.01
"""A set binds where it leaves out a token of one response in so many: of a hundred."""

ALIKE = 0.05
"""Two arms end alike where their avg@k differs by less."""

FLAT = 2.0
"""k3 stays flat where it ends below so many times its start."""

REWARDS = 1.0
"""The range of the reward, R_max of Prop. 5.5."""


# --- weights and rejection ---------------------------------------------------------------------------


@claim(
    "Token truncation (TIS) ends above naive",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="remedies",
    needs="token-TIS arm beside a naive arm under the same mismatch",
)
def truncation_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of token TIS minus that of naive at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, roles.both(roles.is_truncated, roles.is_mismatched), roles.is_naive)


@claim(
    "Sequence rejection ends above naive",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="remedies",
    needs="arm that rejects sequences beside a naive arm under the same mismatch",
)
def rejection_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of sequence rejection (K1 or K3) minus that of naive at the same dose, over seeds (Welch): above
    0."""
    yield from scores(results, roles.both(roles.is_rejecting, roles.is_mismatched), roles.is_naive)


@claim(
    "Rejection by K1 ends as rejection by K3",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="alike",
    needs="arms that reject by K1 and by K3 under the same mismatch",
)
def rejections_end_alike(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of sequence rejection by K1 minus that of rejection by K3 at the same dose, both without a veto,
    over seeds (Welch): above -5 points and below 5 points."""
    by_k1, by_k3 = (roles.both(roles.rejects_by(name), roles.is_mismatched) for name in ("reject_k1", "reject_k3"))
    for found in scores(results, by_k1, by_k3):
        first_S, second_S = (
            np.array([score.avg_at_k for score in results.evaluations[arm].scores]) for arm in found.arms
        )
        low, high = (one_sided(arm_difference(first_S + shift, second_S)) for shift in (ALIKE, -ALIKE))
        yield replace(found, p_for=max(low[0], high[1]), p_against=min(low[1], high[0]))


@claim(
    "Truncation with rejection ends above either alone",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="remedies",
    needs="arm with token TIS and rejection beside an arm with one of them under the same mismatch",
)
def both_end_above_either(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of token TIS with rejection minus that of either alone at the same dose, over seeds (Welch): above
    0, of both."""
    together = roles.both(roles.is_truncated_and_rejecting, roles.is_mismatched)
    for either in (roles.is_truncated, roles.is_rejecting):
        yield from scores(results, together, either)


@claim(
    "MIS alone ends above naive",
    f"{DVP}, masked importance sampling",
    unit="share of samples",
    family="remedies",
    needs="MIS arm on all tokens beside a naive arm under the same mismatch",
)
def mis_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of MIS on all tokens minus that of naive at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, roles.both(roles.is_mis, roles.is_mismatched), roles.is_naive)


@claim(
    "DVP ends above MIS",
    f"{OPEN}: the ablation that arXiv 2512.23087 lacks",
    unit="share of samples",
    family="dvp or mis",
    needs="DVP arm beside a MIS arm on all tokens under the same mismatch",
)
def dvp_ends_above_mis(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of DVP minus that of MIS on all tokens at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, roles.both(roles.is_dvp, roles.is_mismatched), roles.is_mis)


@claim(
    "An adaptive ρ ends above the fixed one",
    f"{DVP}, future work",
    unit="share of samples",
    family="adaptive",
    needs="arm with an adaptive threshold beside a DVP arm under the same mismatch",
)
def adaptive_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of a threshold that adapts to entropy, budget or difficulty minus that of DVP at a fixed ρ
    at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, roles.both(roles.is_adaptive, roles.is_mismatched), roles.is_dvp)


@claim(
    "The veto acts in every step with a token outside the trainer's set",
    f"{DVP}, veto",
    unit="share of steps",
    family="veto",
    needs="arm that prunes and has a veto",
)
def veto_catches_outside(results: Results) -> Iterator[Finding]:
    """Of the steps in which a sampled token lay outside the trainer's set, the share in which the veto discarded a
    sequence: all of them, which a single step refutes."""
    for arm in roles.arms_as(results, roles.both(roles.is_pruned, roles.has_veto)):
        outside = np.concatenate([run.metric("dvp/sampled_outside_train_support_count") for run in results.runs[arm]])
        vetoed = np.concatenate([run.metric("rollout_corr/veto_seq_fraction") for run in results.runs[arm]])
        steps, caught = int((outside > 0).sum()), int(((outside > 0) & (vetoed > 0)).sum())
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
    "DVP lowers the unmasked k3 of what it samples, too",
    OPEN,
    unit="ratio",
    family="fair",
    needs="DVP arm beside a naive arm under the same mismatch",
)
def unmasked_divergence_falls(results: Results) -> Iterator[Finding]:
    """A run's mean unmasked k3 under DVP over that under naive at the same dose, as a ratio of geometric means over
    runs: below 1. Each is over the tokens that the arm itself samples, within the trainer's set: it says what an arm's
    training meets, and nothing of the tail that DVP never samples."""
    for arms in roles.pairs(results, roles.both(roles.is_dvp, roles.is_mismatched), roles.is_naive):
        logs = [log10([mean(run.metric(UNMASKED)) for run in results.runs[arm]]) for arm in arms]
        found = _ratio(arms, logs, "unmasked k3 of {} is {} times that of {}")
        yield replace(found, p_for=found.p_against, p_against=found.p_for)


@claim(
    "K3 rises under bypass and not under recompute",
    f"{VEXACT}, finding (b)",
    unit="ratio",
    family="conventions",
    needs="arms with clipped ratios of both conventions under the same mismatch",
)
def bypass_shows_what_recompute_hides(results: Results) -> Iterator[Finding]:
    """The growth of a run's unmasked k3 from its first tenth to its last under bypass over that under recompute, as a
    ratio of geometric means over runs: above 1."""
    bypass = roles.both(roles.clips_by("bypass"), roles.is_mismatched)
    for arms in roles.pairs(results, bypass, roles.clips_by("recompute"), apart=("clip.ratio",)):
        logs = [np.array([growth(run) for run in results.runs[arm]]) for arm in arms]
        yield _ratio(arms, logs, "k3 grows under {} {} times as much as under {}")


@claim(
    "Under recompute the reward falls while K3 stays flat",
    f"{VEXACT}, finding (b)",
    unit="reward",
    family="flat",
    needs="arm with a clipped ratio of the recompute convention under a mismatch",
)
def reward_falls_while_flat(results: Results) -> Iterator[Finding]:
    """A run's mean reward over the last tenth of its steps less that over the first tenth, as a mean over runs: below
    0; and its mean unmasked k3 there less than twice as large, as a geometric mean. The effect is the reward's; where
    no run's reward falls there is nothing to test."""
    for arm in roles.arms_as(results, roles.both(roles.clips_by("recompute"), roles.is_mismatched)):
        change_S = [last - first for first, last in (first_and_last(run, REWARD) for run in results.runs[arm])]
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
        # Both parts have to hold, an intersection-union test; either one that fails refutes it, by Bonferroni.
        holds, fails = float(np.max([down, flat])), min(1.0, 2 * float(np.min([up, steep])))
        found = Finding((arm,), fewest.n, *ends, words, holds, fails)
        if not np.nanmin(change_S) < 0:
            found = replace(found, words=f"no run's reward falls; {words}", outcome=UNTESTABLE)
        yield found


@claim(
    "Under recompute C(r) is skewed by the sign of the advantage",
    f"{VEXACT}, finding (b)",
    unit="advantage",
    family="skew",
    needs="arm with a clipped ratio of the recompute convention under a mismatch",
)
def skewed_by_advantage(results: Results) -> Iterator[Finding]:
    """The mean C(r) = -(r - 1) A over a step's tokens, of r_corr, which is 0 where the mismatch does not know the sign
    of the advantage, as a mean over a run's steps and then over runs: not 0."""
    for arm in roles.arms_as(results, roles.both(roles.clips_by("recompute"), roles.is_mismatched)):
        skews = [mean(np.sum([run.metric(part) for part in SKEWED], axis=0)) for run in results.runs[arm]]
        skew = difference_from(skews, 0.0)
        ends = (skew.mean, skew.low, skew.high)
        # Either sign is a skew: of two one-sided tests at half the level one has to hold.
        yield measured((arm,), skew, ends, f"mean C(r) is {interval(*ends)}", min(one_sided(skew)), math.nan)


@claim(
    "The measured bias bound is not empty",
    f"{DVP}, Prop. 5.5",
    unit="reward",
    family="bound",
    needs="DVP arm",
)
def bound_says_something(results: Results) -> Iterator[Finding]:
    """A step's bound T (1 − Z_min) on |J_mp − J|, of its longest response and its smallest kept mass, as a mean over a
    run's steps and then over runs: below 1, the range of the rewards."""
    for arm in roles.arms_as(results, roles.is_dvp):
        bounds = [mean(run.metric(BOUND)) for run in results.runs[arm]]
        lost = mean(np.array([mean(run.metric(LOST)) for run in results.runs[arm]]))
        found = _above(arm, bounds, REWARDS, f"the bound is {{}} on average, E[Σ (1 − Z)] {lost:.3g}")
        yield replace(found, p_for=found.p_against, p_against=found.p_for)


@claim(
    "DVP's set at ρ = e⁻¹³ leaves out a token of one response in a hundred",
    OPEN,
    unit="tokens a response",
    family="binds",
    needs="DVP arm at the paper's ρ",
)
def set_binds(results: Results) -> Iterator[Finding]:
    """Tokens of a response that would lie outside the trainer's set if they were drawn from its full distribution,
    T (1 − Z), of a step's mean length and mean kept mass, as a mean over a run's steps and then over runs: above
    0.01."""
    for arm in roles.arms_as(results, roles.both(roles.is_dvp, roles.has_papers_rho)):
        lost = [mean(run.metric(LENGTH) * (1 - run.metric(KEPT))) for run in results.runs[arm]]
        yield _above(arm, lost, BINDS, "its set leaves out {} tokens of a response")


def _above(arm: str, level_S: Sequence[float], limit: float, words: str) -> Finding:
    """That the mean of one number a run lies above a limit."""
    level = difference_from(level_S, 0.0)
    ends = (level.mean, level.low, level.high)
    tested = one_sided(difference_from(level_S, limit))
    return measured((arm,), level, ends, words.format(interval(*ends)), *tested)


# --- the price ---------------------------------------------------------------------------------------


@claim(
    "What pruning or weighting costs a step",
    OPEN,
    unit="ratio",
    family="price",
    needs="arm that prunes or weights beside a naive arm with the same engine and mismatch",
)
def remedies_take_time(results: Results) -> Iterator[Finding]:
    """The seconds of a step, as a mean over a run's steps, of an arm that prunes or weights over those of naive, as a
    ratio of geometric means over runs. Runs share a machine with others, so that it is told and not tested; benchmarks
    measure it side by side."""
    yield from _times(results, lambda own: not roles.is_naive(own), roles.is_naive)


@claim(
    "What zero mismatch costs a step",
    OPEN,
    unit="ratio",
    family="price",
    needs="naive arm with the exact engine beside one with another engine",
)
def exactness_takes_time(results: Results) -> Iterator[Finding]:
    """The seconds of a step, as a mean over a run's steps, of naive with the exact engine over those of naive with
    another engine, as a ratio of geometric means over runs; told and not tested likewise."""
    exact, other = (roles.both(roles.is_naive, role) for role in (roles.has_exact_engine, roles.has_own_mismatch))
    yield from _times(results, exact, other, apart=("sampler",))


def _times(
    results: Results, first: roles.Role, second: roles.Role, *, apart: tuple[str, ...] = ()
) -> Iterator[Finding]:
    for arms in roles.pairs(results, first, second, apart=apart):
        logs = [log10([mean(run.metric("time/step")) for run in results.runs[arm]]) for arm in arms]
        found = _ratio(arms, logs, "a step of {} takes {} times as long as one of {}")
        yield replace(found, p_for=math.nan, p_against=math.nan, outcome=found.outcome or MEASURED)


def _ratio(arms: tuple[str, str], logs: Sequence[FloatArray], words: str) -> Finding:
    """The ratio of two geometric means over runs, for the claim that it is above 1."""
    known = [logs_S[~np.isnan(logs_S)] for logs_S in logs]
    if not all(logs_S.size for logs_S in known):
        return nothing(arms)
    ratio = arm_difference(*known)
    said = words.format(arms[0], interval(*powers(ratio)), arms[1])
    return measured(arms, ratio, powers(ratio), said, *one_sided(ratio))
