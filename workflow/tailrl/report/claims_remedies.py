"""More of what the papers claim or leave open: remedies beside each other, conventions of the ratio, the bias bound.

As in `claims`: a function a claim, its docstring the primary endpoint, the arms found by their settings.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tailrl.report import roles
from tailrl.report.data import FloatArray, Results
from tailrl.report.endpoints import UNMASKED, growth, log10, mean, powers, scores
from tailrl.report.findings import (
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
)
from tailrl.report.statistics import arm_difference, difference_from, one_sided

__all__ = ["CLAIMS"]

BOUND = "dvp/bias_bound_paper"

KEPT, LENGTH = "dvp/kept_mass_train_mean", "response/length_mean"

BINDS = 0.01
"""A set binds where it leaves out a token of one response in so many: of a hundred."""

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
    "The veto discards every step's sequences with a token outside the trainer's set",
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
    "DVP lowers the unmasked KL too",
    OPEN,
    unit="ratio",
    family="fair",
    needs="DVP arm beside a naive arm under the same mismatch",
)
def unmasked_divergence_falls(results: Results) -> Iterator[Finding]:
    """A run's mean unmasked k3 under DVP over that under naive at the same dose, as a ratio of geometric means over
    runs: below 1."""
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
        found = _above(arm, bounds, REWARDS, "the bound is {} on average")
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
    "Pruning or weighting makes a step longer",
    OPEN,
    unit="ratio",
    family="price",
    needs="arm that prunes or weights beside a naive arm with the same engine and mismatch",
)
def remedies_take_time(results: Results) -> Iterator[Finding]:
    """The seconds of a step, as a mean over a run's steps, of an arm that prunes or weights over those of naive, as a
    ratio of geometric means over runs: above 1."""
    yield from _times(results, lambda own: not roles.is_naive(own), roles.is_naive)


@claim(
    "Zero mismatch makes a step longer",
    OPEN,
    unit="ratio",
    family="price",
    needs="naive arm with the exact engine beside one with another engine",
)
def exactness_takes_time(results: Results) -> Iterator[Finding]:
    """The seconds of a step, as a mean over a run's steps, of naive with the exact engine over those of naive with
    another engine, as a ratio of geometric means over runs: above 1."""
    exact, other = (roles.both(roles.is_naive, role) for role in (roles.has_exact_engine, roles.has_own_mismatch))
    yield from _times(results, exact, other, apart=("sampler",))


def _times(
    results: Results, first: roles.Role, second: roles.Role, *, apart: tuple[str, ...] = ()
) -> Iterator[Finding]:
    for arms in roles.pairs(results, first, second, apart=apart):
        logs = [log10([mean(run.metric("time/step")) for run in results.runs[arm]]) for arm in arms]
        yield _ratio(arms, logs, "a step of {} takes {} times as long as one of {}")


def _ratio(arms: tuple[str, str], logs: Sequence[FloatArray], words: str) -> Finding:
    """The ratio of two geometric means over runs, for the claim that it is above 1."""
    known = [logs_S[~np.isnan(logs_S)] for logs_S in logs]
    if not all(logs_S.size for logs_S in known):
        return nothing(arms)
    ratio = arm_difference(*known)
    said = words.format(arms[0], interval(*powers(ratio)), arms[1])
    return measured(arms, ratio, powers(ratio), said, *one_sided(ratio))
