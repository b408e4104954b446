"""The summary of a study in words and tables (Markdown), generated from its results and from nothing else."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tailrl.analysis import arm_kinds
from tailrl.analysis.describe import describe_arms, what_ran
from tailrl.analysis.format import LOST, count, p_value, percent, points, spread, table
from tailrl.analysis.scores import Comparison, compare_arms, gains_over_base
from tailrl.analysis.tables import mean_of
from tailrl.artifacts.results import Results
from tailrl.claims.decide import Verdict
from tailrl.config.study import Study
from tailrl.stats.intervals import LEVEL, problem_interval
from tailrl.stats.power import MOST
from tailrl.tracking import metrics as keys

LAST = 0.1
"""The share of the steps, from the end, that the final reward is the mean of."""

TRAINING_COLUMNS = {
    "k3 masked": keys.K3_MASKED,
    "k3 unmasked": keys.K3_UNMASKED,
    LOST: keys.KEPT_MASS_TRAIN,
    "outside": keys.OUTSIDE,
    "rejected": keys.REJECTED,
    "vetoed": keys.VETOED,
}
"""Columns that are means over all steps; of the kept mass, what it lacks of 1."""


def summarize(study: Study, results: Results, verdicts: Sequence[Verdict]) -> str:
    """summary.md: what was asked, the papers' claims, the arms, their scores, the comparisons, and what ran."""
    parts = [
        f"# {study.name}",
        _what_it_is(study, results),
        "## Claims",
        _claims_table(verdicts),
        _claims_note(verdicts),
        "## Arms",
        _arms_table(results),
        "## Held-out score",
        _score_table(results),
        _score_note(results),
        "## Training",
        _training_table(results),
        _training_note(),
        "## Differences between arms",
        _comparisons(results),
        "## What ran",
        what_ran(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdict(comparison: Comparison, k3: Mapping[str, float]) -> str:
    """What one comparison allows to say, with p by Holm over those that are reported.

    Args:
        comparison: the two arms' difference.
        k3: mean unmasked k3 KL of each arm, nats (NaN: not recorded), the size of the mismatch.
    """
    first, second, both = comparison.first, comparison.second, comparison.both
    size = ", ".join(f"{arm} {k3[arm]:.2g}" for arm in (second, first) if not math.isnan(k3[arm]))
    place = f" (unmasked k3: {size} nats)" if size else ""
    if math.isnan(both.low):
        alone = comparison.problems
        found = "no verdict on the arms, since a single seed, or seeds that agree, show nothing of how much runs differ"
        return f"**{first} against {second}**: {found}{place}. Between these policies: {points(alone)} points."
    if comparison.both_p_holm <= LEVEL:
        found = f"{first} is {'above' if both.mean > 0 else 'below'} {second}"
    else:
        largest = 100 * max(abs(both.low), abs(both.high))
        found = f"no difference shown; by itself it rules out differences beyond {largest:.1f} points"
    return f"**{first} against {second}**: {found}{place}."


def _what_it_is(study: Study, results: Results) -> str:
    training, evaluation = study.training, study.evaluation
    problems, samples = results.base.scores[0].correct_PK.shape
    described = f"{study.description.rstrip('.')}. " if study.description else ""
    return (
        f"{described}The same policy is trained on the task `{study.task.name}` in {count(len(results.arms), 'arm')} "
        f"with {count(len(study.seeds), 'seed')} each: {count(training.steps, 'step')} of "
        f"{count(training.prompts, 'problem')} with {count(training.group_size, 'response')} each, unless an arm says "
        f"otherwise. Every trained policy and the untrained "
        f"one (base) answers the same {problems} held-out problems of `{evaluation.task.name}`, {samples} samples "
        f"each at temperature {evaluation.temperature:g} from the same random streams. Intervals are at 95 %."
    )


def _claims_table(verdicts: Sequence[Verdict]) -> str:
    header = ("claim", "source", "verdict", "at", "arms", "seeds", "seen", "p", "p, Holm", "id")
    rows = []
    for v in filter(lambda v: v.arms, verdicts):
        scope = [v.dose, v.arms, str(v.seeds or "")]
        rows.append(
            [v.claim, v.source, f"**{v.verdict}**", *scope, v.seen, p_value(v.p), p_value(v.p_holm), f"`{v.id}`"]
        )
    unspoken = "; ".join(v.claim for v in verdicts if not v.arms)
    rest = f"The study has no arms for these (`tables/claims.csv` says which it takes): {unspoken}." if unspoken else ""
    return "\n\n".join(part for part in (table(header, rows) if rows else "", rest) if part)


def _claims_note(verdicts: Sequence[Verdict]) -> str:
    policy, task = verdicts[0].policy, verdicts[0].task
    return (
        f"Policy: {policy}; task: {task}. Intervals are over seeds. Reproduced: the p of a one-sided test that the "
        "claim holds, by Holm over the tests of its family (the survival comparisons of a mismatch; those of scores by "
        "question: a mismatch's harm, DVP where there is none, what DVP and DVP + MIS gain, what the other corrections "
        f"gain, DVP against MIS, an adaptive ρ; else those of the claim), is at most {50 * LEVEL:.1f} %; "
        "contradicted: the same of its opposite. The table's p are two-sided. They are over seeds, and one question at "
        "a time: the differences between arms below are over seeds and problems, and over every pair of that table, so "
        "that a claim can hold where that table shows no difference. Measured: a question whose answer is a figure. "
        "Not testable at this scale: nothing collapsed or exploded. Endpoints, fixed beforehand, effects and their "
        "intervals stand in `tables/claims.csv`."
    )


def _arms_table(results: Results) -> str:
    words = describe_arms(results)
    return table(
        ("arm", "what it is", "seeds"),
        ([arm, words[arm], ", ".join(str(run.seed) for run in results.runs[arm])] for arm in results.arms),
    )


def _score_table(results: Results) -> str:
    samples = results.base.scores[0].correct_PK.shape[1]
    base = results.base.scores[0]
    rows = [["base", percent(problem_interval(base.correct_PK)), f"{100 * base.pass_at_k:.1f} %", "", "", ""]]
    for gain in gains_over_base(results):
        seeds = f"{100 * gain.single_min:+.1f} to {100 * gain.single_max:+.1f}, all above {100 * gain.single_low:+.1f}"
        cells = [percent(gain.avg), percent(gain.passed), points(gain.gain), p_value(gain.gain_p_holm), seeds]
        rows.append([gain.arm, *cells])
    scores = (f"avg@{samples}", f"pass@{samples}")
    header = ("arm", *scores, "gain over base, points", "p, Holm", "gain of single seeds, points")
    return table(header, rows)


def _score_note(results: Results) -> str:
    single = all(len(runs) == 1 for runs in results.runs.values())
    missing = " With one seed there is no such interval." if single else ""
    return (
        "Intervals are over seeds and problems: both kinds of repetition count as random, problems shared by all "
        "policies (two-way analysis of variance, Satterthwaite's t). base is one policy: its interval is over "
        "problems. p of the gains is by Holm over the arms. Of single seeds the range of the gain is given, and the "
        f"lowest end of their own intervals, paired over problems.{missing}"
    )


def _training_table(results: Results) -> str:
    rows = []
    for arm in results.arms:
        runs = results.runs[arm]
        reward = spread(mean_of(runs, keys.REWARD, last=LAST))
        means = {name: mean_of(runs, key) for name, key in TRAINING_COLUMNS.items()}
        cells = [spread(1.0 - values if name == LOST else values) for name, values in means.items()]
        rows.append([arm, reward, *cells])
    return table(("arm", "final reward", *TRAINING_COLUMNS), rows)


def _training_note() -> str:
    return (
        f"Means over seeds (smallest to largest seed). Final reward: the last {100 * LAST:.0f} % of the steps; all "
        "else: all steps. k3 is in nats per token: masked on the pruned distributions, for tokens inside the trainer's "
        "set, unmasked on the full ones for the same tokens: one definition in every arm, over what that arm samples. "
        "1 − Z: mass outside the trainer's set. Outside: share of sampled tokens outside the trainer's set. Rejected "
        "and vetoed: shares of sequences."
    )


def _comparisons(results: Results) -> str:
    comparisons = [c for c in compare_arms(results, arm_kinds.references(results)) if c.why]
    if not comparisons:
        return "The study has one arm: there is nothing to compare."
    k3 = {arm: _mean_k3(results, arm) for arm in results.arms}
    compared = comparison_table(comparisons, "tables/differences.csv")
    return "\n\n".join([compared, *(verdict(c, k3) for c in comparisons)])


def comparison_table(comparisons: Sequence[Comparison], others: str) -> str:
    """Differences between arms, a line each, and below them what the numbers are; `others` names the table of all."""
    rows = [
        [c.first, c.second, c.why, points(c.both), p_value(c.both.p), p_value(c.both_p_holm), *_power(c)]
        for c in comparisons
    ]
    note = (
        "Points of avg. Each arm stands beside what it is to be held against: naive under the same mismatch, its "
        f"matched control, itself without a mismatch; every other pair is in `{others}`. Intervals are at "
        "95 %, each by itself, over seeds and problems. p is given raw and by Holm over the "
        f"{count(len(comparisons), 'comparison')} of this table: a difference is claimed where that is at most "
        f"{LEVEL:g}. Seeds needed: seeds an arm with which a true difference of the size seen is found over seeds "
        "(Welch, level 5 %) with a chance of 80 %. Least seen: the smallest true difference that the seeds at hand "
        "find with that chance; both rest on the variances seen, and are rough where seeds are few."
    )
    header = ("arm", "minus", "which is its", "difference", "p", "p, Holm", "seeds needed", "least seen, points")
    return f"{table(header, rows)}\n\n{note}"


def _power(comparison: Comparison) -> tuple[str, str]:
    """Seeds needed and the smallest difference seen, in words; empty where the seeds say nothing of their variance."""
    needed, least = comparison.seeds_needed, comparison.least_seen
    seeds = "" if math.isnan(needed) else f"{needed:.0f}" if math.isfinite(needed) else f"over {MOST:,}"
    return seeds, "" if math.isnan(least) else f"{100 * least:.1f}"


def _mean_k3(results: Results, arm: str) -> float:
    values = mean_of(results.runs[arm], keys.K3_UNMASKED)
    return float(np.nanmean(values)) if (~np.isnan(values)).any() else math.nan
