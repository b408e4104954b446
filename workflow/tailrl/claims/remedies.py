"""More of what the papers claim or leave open: remedies beside each other, and their price.

As in `claims`: a function a claim, its docstring the primary endpoint, the arms found by their settings.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tailrl.analysis import arm_kinds
from tailrl.artifacts.results import Results
from tailrl.claims.endpoints import log10, mean, ratio_of_runs, scores
from tailrl.claims.finding import CLAIMS, DVP, MEASURED, OPEN, VEXACT, Finding, claim
from tailrl.stats.tests import all_hold, arm_difference, one_sided
from tailrl.tracking.metrics import STEP_SECONDS

__all__ = ["CLAIMS"]

ALIKE = 0.05
"""Two arms end alike where their avg@k differs by less."""


# --- weights and rejection ---------------------------------------------------------------------------


@claim(
    "vexact.c.tis",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="remedies",
    needs="token-TIS arm beside a naive arm under the same mismatch",
)
def truncation_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of token TIS minus that of naive at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, arm_kinds.both(arm_kinds.is_truncated, arm_kinds.is_mismatched), arm_kinds.is_naive)


@claim(
    "vexact.c.rejection",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="remedies",
    needs="arm that rejects sequences beside a naive arm under the same mismatch",
)
def rejection_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of sequence rejection (K1 or K3) minus that of naive at the same dose, over seeds (Welch): above
    0."""
    yield from scores(results, arm_kinds.both(arm_kinds.is_rejecting, arm_kinds.is_mismatched), arm_kinds.is_naive)


@claim(
    "vexact.c.k1_or_k3",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="alike",
    needs="arms that reject by K1 and by K3 under the same mismatch",
)
def rejections_end_alike(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of sequence rejection by K1 minus that of rejection by K3 at the same dose, both without a veto,
    over seeds (Welch): above -5 points and below 5 points."""
    by_k1, by_k3 = (
        arm_kinds.both(arm_kinds.rejects_by(name), arm_kinds.is_mismatched) for name in ("reject_k1", "reject_k3")
    )
    for found in scores(results, by_k1, by_k3):
        first_S, second_S = (
            np.array([score.avg_at_k for score in results.evaluations[arm].scores]) for arm in found.arms
        )
        low, high = (one_sided(arm_difference(first_S + shift, second_S)) for shift in (ALIKE, -ALIKE))
        p_for, p_against = all_hold(low, high[::-1])
        yield replace(found, p_for=p_for, p_against=p_against)


@claim(
    "vexact.c.r_corr",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="ratios",
    needs="arms that reject by r_corr and by r_ppo under the same mismatch, with several updates on a step's rollouts",
)
def r_corr_ends_above_r_ppo(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of sequence rejection by the mean K3 of r_corr minus that of rejection by the mean K3 of r_ppo at
    the same dose, each at its own threshold, over seeds (Welch): above 0."""
    by_corr = arm_kinds.both(arm_kinds.rejects_by("reject_k3"), arm_kinds.is_mismatched)
    yield from scores(results, by_corr, arm_kinds.rejects_by("reject_k3", "r_ppo"))


@claim(
    "vexact.c.both",
    f"{VEXACT}, finding (c)",
    unit="share of samples",
    family="remedies",
    needs="arm with token TIS and rejection beside arms with one of them each under the same mismatch",
)
def both_end_above_either(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of token TIS with rejection minus that of either alone at the same dose, over seeds (Welch): above
    0, of both. The effect is the smaller of the differences."""
    together = arm_kinds.both(arm_kinds.is_truncated_and_rejecting, arm_kinds.is_mismatched)
    truncated, rejected = (
        list(scores(results, together, one)) for one in (arm_kinds.is_truncated, arm_kinds.is_rejecting)
    )
    for arm in dict.fromkeys(found.arms[0] for found in truncated):
        alone = [[found for found in kind if found.arms[0] == arm] for kind in (truncated, rejected)]
        if all(alone):
            yield _above_all(arm, [*alone[0], *alone[1]])


def _above_all(arm: str, parts: Sequence[Finding]) -> Finding:
    """That one arm ends above each of some others."""
    least = min(parts, key=lambda part: part.effect)
    return Finding(
        (arm, *(part.arms[1] for part in parts)),
        min(part.seeds for part in parts),
        least.effect,
        least.low,
        least.high,
        "; ".join(part.words for part in parts),
        *all_hold(*((part.p_for, part.p_against) for part in parts)),
    )


@claim(
    "dvp.mis.score",
    f"{DVP}, masked importance sampling",
    unit="share of samples",
    family="remedies",
    needs="MIS arm on all tokens beside a naive arm under the same mismatch",
)
def mis_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of MIS on all tokens minus that of naive at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, arm_kinds.both(arm_kinds.is_mis, arm_kinds.is_mismatched), arm_kinds.is_naive)


@claim(
    "open.dvp_or_mis.score",
    f"{OPEN}: the ablation that arXiv 2512.23087 lacks",
    unit="share of samples",
    family="dvp or mis",
    needs="DVP arm beside a MIS arm on all tokens under the same mismatch",
)
def dvp_ends_above_mis(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of DVP minus that of MIS on all tokens at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, arm_kinds.both(arm_kinds.is_dvp, arm_kinds.is_mismatched), arm_kinds.is_mis)


@claim(
    "dvp.adaptive.score",
    f"{DVP}, future work",
    unit="share of samples",
    family="adaptive",
    needs="arm with an adaptive threshold beside a DVP arm under the same mismatch",
)
def adaptive_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of a threshold that adapts to entropy, budget or difficulty minus that of DVP at a fixed ρ
    at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, arm_kinds.both(arm_kinds.is_adaptive, arm_kinds.is_mismatched), arm_kinds.is_dvp)


# --- the price ---------------------------------------------------------------------------------------


@claim(
    "price.remedies",
    OPEN,
    unit="ratio",
    family="price",
    needs="arm that prunes or weights beside a naive arm with the same engine and mismatch",
)
def remedies_take_time(results: Results) -> Iterator[Finding]:
    """The seconds of a step, as a mean over a run's steps, of an arm that prunes or weights over those of naive, as a
    ratio of geometric means over runs. Runs share a machine with others, so that it is told and not tested; benchmarks
    measure it side by side."""
    yield from _times(results, lambda own: not arm_kinds.is_naive(own), arm_kinds.is_naive)


@claim(
    "price.zero_mismatch",
    OPEN,
    unit="ratio",
    family="price",
    needs="naive arm without a mismatch beside one with an engine's own",
)
def exactness_takes_time(results: Results) -> Iterator[Finding]:
    """The seconds of a step, as a mean over a run's steps, of naive with the exact engine or verified over those of
    naive with an engine's own mismatch, as a ratio of geometric means over runs; told and not tested likewise."""
    exact, other = (
        arm_kinds.both(arm_kinds.is_naive, role) for role in (arm_kinds.has_no_mismatch, arm_kinds.has_own_mismatch)
    )
    yield from _times(results, exact, other, apart=("sampler",))


def _times(
    results: Results, first: arm_kinds.Role, second: arm_kinds.Role, *, apart: tuple[str, ...] = ()
) -> Iterator[Finding]:
    for arms in arm_kinds.pairs(results, first, second, apart=apart):
        logs = [log10([mean(run.metric(STEP_SECONDS)) for run in results.runs[arm]]) for arm in arms]
        found = ratio_of_runs(arms, logs, "a step of {} takes {} times as long as one of {}")
        yield replace(found, p_for=math.nan, p_against=math.nan, outcome=found.outcome or MEASURED)
