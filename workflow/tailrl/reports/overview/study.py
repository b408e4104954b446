"""The report: tables, figures and a summary in words, from the files of training and evaluation.

It reads files only and needs neither torch nor an engine. `results` is always the study's own folder,
results/<study>, with `train/<arm>/seed<seed>/` and `eval/<arm>.json` in it.
"""

from collections.abc import Sequence
from pathlib import Path

from tailrl.analysis import runs, scores, tables
from tailrl.analysis.arm_pairs import references
from tailrl.analysis.describe import arm_rows
from tailrl.analysis.first_steps import first_k3, k3_ratios
from tailrl.analysis.survival import survival_curve
from tailrl.analysis.tables import BEHIND
from tailrl.artifacts.claims import write_verdicts
from tailrl.artifacts.results import Results, read_results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.claims.evidence import read_shown
from tailrl.claims.gradients import judge_gradients
from tailrl.claims.study import judge
from tailrl.config.study import Study
from tailrl.report import figures, gradients, snapshots
from tailrl.report.ablation import write_ablation
from tailrl.report.axes import save_svg
from tailrl.report.distributions import write_distribution_report
from tailrl.report.page import CAPTIONS, Drawing, caption, page
from tailrl.report.paper import claims_page, write_paper
from tailrl.report.pooled import write_pooled
from tailrl.report.screen import first_screen
from tailrl.report.summary import summarize
from tailrl.report.survival import survival_figure
from tailrl.report.tokens import worst_responses
from tailrl.stats.intervals import problem_interval
from tailrl.tracking.metrics import K3_MASKED, REWARD, VETOED

__all__ = [
    "CAPTIONS",
    "claims_page",
    "read_shown",
    "write_ablation",
    "write_distribution_report",
    "write_gradients",
    "write_paper",
    "write_pooled",
    "write_report",
]

FIGURES = ("evaluation", "training", "survival", "mismatch", "delta", "kept", "time")


def write_report(study: Study, results: Path, out: Path) -> None:
    """Write out/summary.md, out/summary.html with figures in it, out/figures/*.svg and their tables, out/tables/*.csv.

    Args:
        study: its arms and seeds are reported.
        results: the study's results folder.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: a result is missing, unreadable or empty.
    """
    read = read_results(study, results, study.arms)
    pruned = [arm for arm in read.arms if study.arms[arm].vocabulary.prunes]
    curves = _write_curves(read, pruned, out)
    write_csv(out / "tables" / "arms.csv", arm_rows(read))
    bins = [row for arm in read.arms for row in tables.delta_bins(read.runs[arm])]
    write_csv(out / "tables" / "delta.csv", flat_rows(bins))
    save_svg(figures.delta_figure(bins, read.arms), out / "figures" / "delta.svg")
    shares = [row for arm in read.arms for row in tables.time_shares(read.runs[arm])]
    write_csv(out / "tables" / "time.csv", flat_rows(shares))
    save_svg(figures.time_figure(shares, read.arms), out / "figures" / "time.svg")
    first = first_k3(read)
    write_csv(out / "tables" / "first_k3.csv", flat_rows(first))
    write_csv(out / "tables" / "k3_ratios.csv", flat_rows(k3_ratios(first)))
    write_csv(out / "tables" / "flips.csv", runs.flip_rows(read))
    write_csv(out / "tables" / "responses.csv", flat_rows(runs.response_means(read)))
    write_csv(out / "tables" / "course.csv", flat_rows(runs.course(read)))
    gains, policies = scores.gains_over_base(read), scores.policy_scores(read)
    comparisons = scores.compare_arms(read, references(read))
    _write_evaluation(read, gains, policies, comparisons, out)
    drawn_too = _write_snapshots(read, out)
    survival = [row for arm in read.arms for row in survival_curve(arm, read.runs[arm])]
    write_csv(out / "tables" / "survival.csv", flat_rows(survival))
    save_svg(survival_figure(read), out / "figures" / "survival.svg")
    verdicts = judge(read)
    write_verdicts(out / "tables" / "claims.csv", verdicts)
    summary = summarize(study, read, verdicts, gains, comparisons)
    (out / "summary.md").write_text(summary, encoding="utf-8")
    screen = first_screen(read, gains, policies, curves, verdicts)
    drawn = [
        Drawing(
            out / "figures" / f"{name}.svg",
            caption(name),
            tuple(f"tables/{table}.csv" for table in BEHIND.get(name, (name,))),
        )
        for name in (*FIGURES, *drawn_too)
    ]
    (out / "summary.html").write_text(page(summary, drawn, screen, worst_responses(read, results)), encoding="utf-8")


def write_gradients(results: Path, out: Path) -> None:
    """Write the tables and the figure of the measured gradients, and their verdicts as out/claims.csv.

    Raises:
        StudyError: results/quality.jsonl or results/run.json is missing, unreadable or empty.
    """
    verdicts = judge_gradients(*gradients.write_gradients(results, out))
    write_verdicts(out / "claims.csv", verdicts)


def _write_curves(results: Results, pruned: list[str], out: Path) -> list[tables.Curve]:
    """Write the figures over the steps: training, mismatch, and the kept mass of pruned arms. Returns the curves."""
    window = tables.window_of(results.all_runs())
    training = [tables.curve(results.runs[arm], key, window=window) for key in figures.TRAINING for arm in results.arms]
    keys = (*figures.MISMATCH, VETOED)
    mismatch = [tables.curve(results.runs[arm], key) for key in keys for arm in results.arms]
    kept = [
        tables.curve(results.runs[arm], key, lost=figures.is_mass(key))
        for pair in figures.KEPT
        for key in pair
        for arm in pruned
    ]
    drawn = {
        "training": (training, figures.training_figure),
        "mismatch": (mismatch, figures.mismatch_figure),
        "kept": (kept, figures.kept_figure),
    }
    for name, (curves, draw) in drawn.items():
        write_csv(out / "tables" / f"{name}.csv", (row for curve in curves for row in curve.rows()))
        save_svg(draw(curves, results.arms), out / "figures" / f"{name}.svg")
    return [*training, *mismatch, *kept]


def _write_snapshots(results: Results, out: Path) -> tuple[str, ...]:
    """Write held-out scores over the steps, if policies were kept on the way; returns the figure's name, or nothing."""
    if not any(evaluation.snapshots for evaluation in results.evaluations.values()):
        return ()
    points = snapshots.score_points(results)
    write_csv(out / "tables" / "figure1.csv", flat_rows(points))
    window = tables.window_of(results.all_runs())
    curves = [
        tables.curve(results.runs[arm], key, window=window) for key in (REWARD, K3_MASKED) for arm in results.arms
    ]
    save_svg(snapshots.figure1(points, curves, results.arms), out / "figures" / "figure1.svg")
    return ("figure1",)


def _write_evaluation(
    results: Results,
    gains: Sequence[scores.Gain],
    policies: Sequence[scores.PolicyScore],
    comparisons: Sequence[scores.Comparison],
    out: Path,
) -> None:
    """Write the held-out scores: per arm, per policy and between arms."""
    base = results.base.scores[0]
    write_csv(out / "tables" / "evaluation.csv", flat_rows(gains))
    write_csv(out / "tables" / "policies.csv", flat_rows(policies))
    write_csv(out / "tables" / "problems.csv.gz", scores.problem_rows(results))
    write_csv(out / "tables" / "rewards.csv.gz", runs.reward_rows(results))
    write_csv(out / "tables" / "differences.csv", flat_rows(comparisons))
    figure = figures.evaluation_figure(gains, policies, problem_interval(base.correct_PK), base.correct_PK.shape[1])
    save_svg(figure, out / "figures" / "evaluation.svg")
