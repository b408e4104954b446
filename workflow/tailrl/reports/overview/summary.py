"""The summary of a study in words and tables (Markdown), made from its results alone."""

import math
from collections.abc import Mapping, Sequence

from tailrl.analysis.describe import describe_arms, what_ran
from tailrl.analysis.format import LOST, count, p_value, points, spread
from tailrl.analysis.scores import Comparison, Gain, policy_scores
from tailrl.analysis.tables import mean_of
from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.config.study import Study
from tailrl.report.cards import cards, tally
from tailrl.report.message import mean_k3, three_sentences
from tailrl.report.page import render
from tailrl.stats.intervals import LEVEL, problem_interval
from tailrl.stats.power import MOST
from tailrl.tracking import metrics as keys

LAST = 0.1
"""The final reward is the mean over this last share of the steps."""

TRAINING_COLUMNS = {
    "k3 masked": keys.K3_MASKED,
    "k3 unmasked": keys.K3_UNMASKED,
    LOST: keys.KEPT_MASS_TRAIN,
    "outside": keys.OUTSIDE,
    "rejected": keys.REJECTED,
    "vetoed": keys.VETOED,
}
"""Columns with means over all steps; the kept mass is shown as 1 minus it."""


def summarize(
    study: Study,
    results: Results,
    verdicts: Sequence[Verdict],
    gains: Sequence[Gain],
    compared: Sequence[Comparison],
) -> str:
    """The text of summary.md: what was found, the question, verdicts, arms, scores, comparisons, and what ran."""
    base = results.base.scores[0]
    problems, samples = base.correct_PK.shape
    comparisons = [c for c in compared if c.why]
    k3 = {arm: mean_k3(results, arm) for arm in results.arms}
    return render(
        "summary.md.j2",
        study=study,
        results=results,
        sentences=three_sentences(results, gains, compared, verdicts),
        verdicts=verdicts,
        tally=tally(cards(verdicts)),
        level=LEVEL,
        described=describe_arms(results),
        base=base,
        problems=problems,
        samples=samples,
        untrained=problem_interval(base.correct_PK),
        gains=gains,
        baselines=[policy for policy in policy_scores(results) if policy.arm in results.baselines],
        columns=TRAINING_COLUMNS,
        last=LAST,
        trained={arm: _trained(results.runs[arm]) for arm in results.arms},
        compared=comparison_table(comparisons, "tables/differences.csv") if comparisons else "",
        differences=[difference_sentence(comparison, k3, len(comparisons)) for comparison in comparisons],
        ran=what_ran(results),
    )


def difference_sentence(comparison: Comparison, k3: Mapping[str, float], comparisons: int) -> str:
    """The result of one comparison in words.

    Args:
        comparison: the two arms' difference.
        k3: mean unmasked k3 KL of each arm, nats (NaN: not recorded), the size of the mismatch.
        comparisons: the number of reported comparisons, over which Holm corrects p.
    """
    first, second, both = comparison.first, comparison.second, comparison.both
    size = ", ".join(f"{arm} {k3[arm]:.2g}" for arm in (second, first) if not math.isnan(k3[arm]))
    place = f" (unmasked k3: {size} nats)" if size else ""
    if math.isnan(both.low):
        alone = comparison.problems
        found = "no verdict on the arms: a single seed, or seeds that agree, do not show how much runs differ"
        return f"**{first} against {second}**: {found}{place}. Between these policies: {points(alone)} points."
    found, p = f"{points(both)} points", comparison.both_p_holm
    if p <= LEVEL:
        found = f"{first} is {'above' if both.mean > 0 else 'below'} {second}: {found}"
    elif both.low <= 0 <= both.high:
        found = f"no detectable difference: {found}"
    else:
        found += f"; not confirmed after correction for {count(comparisons, 'comparison')} (p {p_value(p)})"
    return f"**{first} against {second}**: {found}{place}."


def comparison_table(comparisons: Sequence[Comparison], others: str) -> str:
    """The table of differences between arms, with a note; `others` is the file with all pairs."""
    return render("comparisons.md.j2", comparisons=comparisons, others=others, power=_power, level=LEVEL)


def _trained(runs: Sequence[TrainedRun]) -> list[str]:
    """An arm's cells in the training table."""
    means = {name: mean_of(runs, key) for name, key in TRAINING_COLUMNS.items()}
    final = mean_of(runs, keys.REWARD, last=LAST)
    return [spread(final), *(spread(1.0 - values if name == LOST else values) for name, values in means.items())]


def _power(comparison: Comparison) -> tuple[str, str]:
    """Seeds needed and the smallest detectable difference, in words; empty if the variance over seeds is unknown."""
    needed, least = comparison.seeds_needed, comparison.least_seen
    seeds = "" if math.isnan(needed) else f"{needed:.0f}" if math.isfinite(needed) else f"over {MOST:,}"
    return seeds, "" if math.isnan(least) else f"{100 * least:.1f}"
