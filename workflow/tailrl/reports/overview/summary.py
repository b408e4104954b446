"""The summary of a study in words and tables (Markdown), made from its results alone."""

import math
from collections.abc import Sequence

import numpy as np

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.artifacts.tables import Row
from tailrl.config.study import Study
from tailrl.page_parts.number_text import LOST, spread
from tailrl.reports.arm_pairs import references
from tailrl.reports.curves import mean_of
from tailrl.reports.overview.arms import describe_arms
from tailrl.reports.overview.cards import cards, tally
from tailrl.reports.overview.headline import headline
from tailrl.reports.page import render
from tailrl.reports.scores.numbers import Comparison, Gain, greedy_differences, greedy_scores, policy_scores
from tailrl.reports.scores.page import comparison_table
from tailrl.reports.what_ran import what_ran
from tailrl.stats.intervals import LEVEL, problem_interval
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
    return render(
        "overview/summary.md.j2",
        study=study,
        results=results,
        sentences=headline(results, gains, compared, verdicts),
        verdicts=verdicts,
        tally=tally(cards(verdicts)),
        level=LEVEL,
        described=describe_arms(results),
        base=base,
        problems=problems,
        samples=samples,
        untrained=problem_interval(base.correct_PK),
        gains=gains,
        greedy=greedy_scores(results),
        greedy_differences=greedy_differences(results, references(results)),
        baselines=[policy for policy in policy_scores(results) if policy.arm in results.baselines],
        columns=TRAINING_COLUMNS,
        last=LAST,
        trained={arm: list(map(spread, _trained(results.runs[arm]).values())) for arm in results.arms},
        compared=comparison_table(comparisons, "tables/differences.csv") if comparisons else "",
        ran=what_ran(results),
    )


def trained_rows(results: Results) -> list[Row]:
    """The rows of trained.csv: what the table of training shows, with the mean, smallest and largest seed of each."""
    rows: list[Row] = []
    for arm in results.arms:
        row: dict[str, object] = {"arm": arm}
        for title, values in _trained(results.runs[arm]).items():
            known = values[~np.isnan(values)]
            name = "lost" if title == LOST else title.replace(" ", "_")
            for end, of in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                row[f"{name}_{end}"] = float(of(known)) if known.size else math.nan
        rows.append(row)
    return rows


def _trained(runs: Sequence[TrainedRun]) -> dict[str, FloatArray]:
    """Each seed's values by column of the training table."""
    final = {"final reward": mean_of(runs, keys.REWARD, last=LAST)}
    means = {title: mean_of(runs, key) for title, key in TRAINING_COLUMNS.items()}
    return final | {title: 1.0 - values if title == LOST else values for title, values in means.items()}
