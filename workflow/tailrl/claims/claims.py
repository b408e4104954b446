"""What the papers claim, held against a study's results: a function for each claim, which finds where it can be tested.

The arms are found by their settings (`roles`). A function's docstring is the claim's primary endpoint, fixed before any
result; `verdicts` accounts for how many tests there are, and decides.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tailrl.analysis import arm_kinds
from tailrl.analysis.survival import collapses, deepest_loss
from tailrl.artifacts.results import FloatArray, Results, TrainedRun
from tailrl.claims.endpoints import MASKED, UNMASKED, growth, log10, mean, powers, scores, stretches
from tailrl.claims.finding import (
    CLAIMS,
    CONTRADICTED,
    DVP,
    OPEN,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    VEXACT,
    Finding,
    claim,
    interval,
    measured,
    nothing,
    opposite,
)
from tailrl.config.distributions import SAMPLED_HEAD_BELOW as HEAD
from tailrl.config.distributions import TAIL_FROM as TAIL
from tailrl.stats.intervals import share_difference
from tailrl.stats.survival import log_rank
from tailrl.stats.tests import all_hold, difference_from, one_sided

__all__ = ["CLAIMS"]

STABLE = 1e-3
"""k3, nats per token, that the paper's DVP stays below."""

EXPLOSION = 10.0
"""k3 explodes in a run where it ends at so many times its start."""

GAIN = 0.2655
"""DVP + MIS over naive in the paper, which does not say whether in points or relative."""


# --- the tokens --------------------------------------------------------------------------------------

_OWN_NAIVE = arm_kinds.both(arm_kinds.is_naive, arm_kinds.has_own_mismatch)
_NEEDS_OWN = "naive arm under an engine's own mismatch"


@claim("dvp.prop4_2.growth", f"{DVP}, Prop. 4.2", unit="ratio", family="size", needs=_NEEDS_OWN)
def delta_grows(results: Results) -> Iterator[Finding]:
    """Of sampled tokens, a run's mean |Δ| in the tail (-ln π_train at least 5) over that in the head (π_train above
    0.9), as a geometric mean over runs: above 1."""
    for arm in arm_kinds.arms_as(results, _OWN_NAIVE):
        ratios = []
        for run in results.runs[arm]:
            nats_T, delta_T = _tokens(run)
            tail, head = (log10(mean(np.abs(delta_T[part]))) for part in (nats_T >= TAIL, nats_T < HEAD))
            ratios.append(float(tail - head))
        ratio = difference_from(ratios, 0.0)
        words = f"mean |Δ| in the tail is {interval(*powers(ratio))} times that in the head"
        yield measured((arm,), ratio, powers(ratio), words, *one_sided(ratio))


@claim("dvp.prop4_3.sign", f"{DVP}, Prop. 4.3", unit="nats", family="sign", needs=_NEEDS_OWN)
def delta_is_negative(results: Results) -> Iterator[Finding]:
    """A run's mean of −Δ over its sampled tokens in the tail (-ln π_train at least 5), as a mean over runs: above 0."""
    for arm in arm_kinds.arms_as(results, _OWN_NAIVE):
        means = [mean(-delta_T[nats_T >= TAIL]) for nats_T, delta_T in map(_tokens, results.runs[arm])]
        tail = difference_from(means, 0.0)
        ends = (tail.mean, tail.low, tail.high)
        yield measured((arm,), tail, ends, f"mean −Δ in the tail is {interval(*ends)} nats", *one_sided(tail))


# --- the divergence ----------------------------------------------------------------------------------


@claim(
    "dvp.small_kl",
    f"{DVP}, experiments",
    unit="nats",
    family="stable",
    needs="DVP arm under a mismatch",
)
def divergence_stays_small(results: Results) -> Iterator[Finding]:
    """The highest mean of the masked k3 over a tenth of a run's steps, of the stretches that they part the run into, as
    a geometric mean over runs: below 0.001 nats."""
    for arm in arm_kinds.arms_as(results, arm_kinds.both(arm_kinds.is_dvp, arm_kinds.is_mismatched)):
        highest_S = log10([float(np.fmax.reduce(stretches(run, MASKED))) for run in results.runs[arm]])
        level = difference_from(highest_S, 0.0)
        above, below = one_sided(difference_from(highest_S, math.log10(STABLE)))
        words = f"masked k3 is {interval(*powers(level))} nats where it is highest"
        yield measured((arm,), level, powers(level), words, below, above)


@claim(
    "dvp.figure1.explosion",
    f"{DVP}, Figure 1",
    unit="ratio",
    family="explosion",
    needs="naive arm beside a DVP arm under the same mismatch",
)
def divergence_explodes(results: Results) -> Iterator[Finding]:
    """A run's mean unmasked k3 over the last tenth of its steps over that of the first tenth, as a geometric mean over
    runs: above 10 under naive and, at the same dose, below 10 under DVP. The effect is naive's."""
    for arms in arm_kinds.pairs(results, arm_kinds.both(arm_kinds.is_naive, arm_kinds.is_mismatched), arm_kinds.is_dvp):
        grown = [np.array([growth(run) for run in results.runs[arm]]) for arm in arms]
        ratios = [difference_from(logs_S, 0.0) for logs_S in grown]
        exploded = [int((logs_S >= math.log10(EXPLOSION)).sum()) for logs_S in grown]
        fewest = min(ratios, key=lambda ratio: ratio.n)
        if not any(exploded):
            largest = 10 ** float(np.fmax.reduce(np.concatenate(grown)))
            words = f"k3 explodes in no run; where it grows most, it ends at {largest:.3g} times its start"
            yield replace(measured(arms, fewest, powers(ratios[0]), words), outcome=UNTESTABLE)
            continue
        words = "; ".join(
            f"{arm}: k3 ends at {interval(*powers(ratio))} times its start, explodes in {count} of {ratio.n} runs"
            for arm, ratio, count in zip(arms, ratios, exploded, strict=True)
        )
        naive, dvp = (one_sided(difference_from(logs_S, math.log10(EXPLOSION))) for logs_S in grown)
        yield measured(arms, fewest, powers(ratios[0]), words, *all_hold(naive, dvp[::-1]))


@claim(
    "vexact.zero_mismatch.k3",
    f"{VEXACT}, zero-mismatch reference",
    unit="nats",
    family="exact",
    needs="arm with the exact engine, undisturbed, whose responses are scored before the first update on them",
)
def exact_is_exact(results: Results) -> Iterator[Finding]:
    """The largest k3, masked or not, of any step of any run: exactly 0, which a single step refutes. Where nothing
    scores the responses before the first of several updates, what later ones score the policy has learnt from
    already: such arms are left out."""
    for arm in arm_kinds.arms_as(results, arm_kinds.both(arm_kinds.has_exact_engine, arm_kinds.is_scored_first)):
        k3 = np.concatenate([run.metric(key) for run in results.runs[arm] for key in (MASKED, UNMASKED)])
        largest, zeros = float(np.fmax.reduce(np.abs(k3))), int((k3 == 0).sum())
        known = f", the largest is {largest:.2g} nats" if not math.isnan(largest) else ""
        outcome = UNDECIDED if not known else REPRODUCED if zeros == k3.size else CONTRADICTED
        words = f"{zeros} of {k3.size} recorded values are 0{known}"
        yield Finding((arm,), len(results.runs[arm]), largest, math.nan, math.nan, words, outcome=outcome)


# --- the collapse ------------------------------------------------------------------------------------


@claim(
    "vexact.a.collapse",
    f"{VEXACT}, finding (a)",
    unit="share of runs",
    family="survival",
    needs="naive arm under a mismatch beside one without",
)
def collapses_unlike_exact(results: Results) -> Iterator[Finding]:
    """Naive under a mismatch collapses sooner than naive with the exact engine or verified: one-sided log-rank test, by
    permutation of the runs. The effect is the difference in the share of runs that collapsed."""
    control = arm_kinds.both(arm_kinds.is_naive, arm_kinds.has_no_mismatch)
    yield from _survival(results, control, apart=("sampler", "disturbance"))


@claim(
    "vexact.a.collapse.matched",
    f"{VEXACT}, finding (a), by a matched control",
    unit="share of runs",
    family="survival",
    needs="naive arm with a disturbed sampler beside its matched control",
)
def collapses_unlike_matched(results: Results) -> Iterator[Finding]:
    """Naive with a disturbed sampler collapses sooner than its matched control, whose trainer is disturbed likewise:
    one-sided log-rank test, by permutation of the runs. The effect is the difference in the share of runs that
    collapsed."""
    control = arm_kinds.both(arm_kinds.is_naive, arm_kinds.is_matched)
    yield from _survival(results, control, apart=("disturbance.side",))


@claim(
    "dvp.figure1.collapse",
    f"{DVP}, Figure 1",
    unit="share of runs",
    family="survival of DVP",
    needs="DVP arm beside a naive arm under the same mismatch",
)
def collapses_unlike_pruned(results: Results) -> Iterator[Finding]:
    """Naive under a mismatch collapses sooner than DVP under the same: one-sided log-rank test, by permutation of the
    runs. The effect is the difference in the share of runs that collapsed."""
    yield from _survival(results, arm_kinds.is_dvp)


def _survival(results: Results, control: arm_kinds.Role, *, apart: tuple[str, ...] = ()) -> Iterator[Finding]:
    for arms in arm_kinds.pairs(
        results, arm_kinds.both(arm_kinds.is_naive, arm_kinds.is_mismatched), control, apart=apart
    ):
        first, second = (collapses(results.runs[arm]) for arm in arms)
        counts = [(sum(step is not None for step in steps), len(steps)) for steps, _ in (first, second)]
        if not all(n for _, n in counts):
            yield nothing(arms)
            continue
        share = share_difference(*counts)
        words = "; ".join(f"{k} of {n} runs of {arm} collapsed" for arm, (k, n) in zip(arms, counts, strict=True))
        found = Finding(arms, share.n, share.mean, share.low, share.high, words)
        if not any(k for k, _ in counts):
            lost = 100 * deepest_loss([run for arm in arms for run in results.runs[arm]])
            deepest = f"; the deepest loss is {lost:.0f} % of a run's best reward" if not math.isnan(lost) else ""
            yield replace(found, words=f"no run collapsed{deepest}", outcome=UNTESTABLE)
        else:
            yield replace(found, p_for=log_rank(first, second), p_against=log_rank(second, first))


# --- the held-out score ------------------------------------------------------------------------------


@claim(
    "vexact.a.score",
    f"{VEXACT}, finding (a), in scores",
    unit="share of samples",
    family="harm",
    needs="naive arm under a mismatch beside one without",
)
def ends_below_exact(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of naive under a mismatch minus that of naive with the exact engine or verified, over seeds
    (Welch): below 0. The policies answer as they are, undisturbed."""
    control = arm_kinds.both(arm_kinds.is_naive, arm_kinds.has_no_mismatch)
    yield from _lower(results, control, apart=("sampler", "disturbance"))


@claim(
    "vexact.a.score.matched",
    f"{VEXACT}, finding (a), in scores by a matched control",
    unit="share of samples",
    family="harm",
    needs="naive arm with a disturbed sampler beside its matched control",
)
def ends_below_matched(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of naive with a disturbed sampler minus that of its matched control, over seeds (Welch): below 0.
    The policies answer as they are, undisturbed."""
    yield from _lower(results, arm_kinds.both(arm_kinds.is_naive, arm_kinds.is_matched), apart=("disturbance.side",))


def _lower(results: Results, control: arm_kinds.Role, *, apart: tuple[str, ...]) -> Iterator[Finding]:
    naive = arm_kinds.both(arm_kinds.is_naive, arm_kinds.is_mismatched)
    for found in scores(results, naive, control, apart=apart):
        yield opposite(found)


@claim(
    "open.zero_mismatch.score",
    OPEN,
    unit="share of samples",
    family="zero",
    needs="DVP arm beside a naive arm, both without a mismatch",
)
def dvp_ends_above_at_zero(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of DVP minus that of naive, both with the exact engine or both verified, over seeds (Welch): above
    0."""
    zero = arm_kinds.has_no_mismatch
    yield from scores(results, arm_kinds.both(arm_kinds.is_dvp, zero), arm_kinds.both(arm_kinds.is_naive, zero))


@claim(
    "open.matched_noise.score",
    OPEN,
    unit="share of samples",
    family="noisy",
    needs="DVP arm beside a naive arm, both matched controls of the same disturbance",
)
def dvp_ends_above_in_noise(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of DVP minus that of naive, both with a sampler and a trainer that are disturbed alike, so that no
    mismatch is left, over seeds (Welch): above 0."""
    yield from scores(
        results,
        arm_kinds.both(arm_kinds.is_dvp, arm_kinds.is_matched),
        arm_kinds.both(arm_kinds.is_naive, arm_kinds.is_matched),
    )


@claim(
    "dvp.score",
    f"{DVP}, experiments",
    unit="share of samples",
    family="score",
    needs="DVP arm beside a naive arm under the same mismatch",
)
def dvp_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of DVP minus that of naive at the same dose, over seeds (Welch): above 0."""
    yield from scores(results, arm_kinds.both(arm_kinds.is_dvp, arm_kinds.is_mismatched), arm_kinds.is_naive)


@claim(
    "dvp.with_mis.score",
    f"{DVP}, experiments",
    unit="share of samples",
    family="score",
    needs="DVP + MIS arm beside a naive arm under the same mismatch",
)
def dvp_mis_ends_above(results: Results) -> Iterator[Finding]:
    """Held-out avg@k of DVP + MIS minus that of naive at the same dose, over seeds (Welch): above 0. Whether the
    paper's 26.55 % lies in the interval, as points or relative to naive, is said and not tested."""
    for found in scores(results, arm_kinds.both(arm_kinds.is_dvp_mis, arm_kinds.is_mismatched), arm_kinds.is_naive):
        naive = float(np.mean([score.avg_at_k for score in results.evaluations[found.arms[1]].scores]))
        sizes = {"as points": GAIN, "as relative": GAIN * naive}
        said = [f"{'inside' if found.low <= size <= found.high else 'outside'} {how}" for how, size in sizes.items()]
        where = "" if math.isnan(found.low) else f"; of this interval the paper's 26.55 % is {', '.join(said)}"
        yield replace(found, words=found.words + where)


def _tokens(run: TrainedRun) -> tuple[FloatArray, FloatArray]:
    """-ln π_train and Δ of a run's sampled tokens, nats, where both are finite."""
    delta_T = run.tokens.logp_train_T - run.tokens.logp_infer_T
    return -run.tokens.logp_train_T[np.isfinite(delta_T)], delta_T[np.isfinite(delta_T)]
