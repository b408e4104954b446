"""Held-out scores over training, of every policy that was kept on the way, without selection."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tailrl.artifacts.evaluation import Score
from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.reports.axes import (
    arm_legend,
    arm_styles,
    draw_intervals,
    make_panels,
    save_svg_and_pdf,
    set_magnitude_scale,
    set_percent_axis,
    style,
)
from tailrl.reports.curves import Curve, curves_of, draw_curves, window_of
from tailrl.reports.scores.numbers import by_problem
from tailrl.stats.crossed import crossed_interval
from tailrl.stats.intervals import Interval, problem_interval
from tailrl.tracking.metrics import K3_MASKED, REWARD, STEP


@dataclass(frozen=True, slots=True)
class SnapshotPoint:
    """avg@k of an arm's policies after a number of steps, share of 1.

    Attributes:
        step: steps done; 0 is the untrained policy.
        policies: their number, one per seed; a run that ended early has none later.
        avg: with its interval over seeds and problems, or over problems for a single seed.
    """

    arm: str
    step: int
    policies: int
    avg: Interval


def has_snapshots(results: Results) -> bool:
    """Whether policies were kept on the way."""
    return any(evaluation.snapshots for evaluation in results.evaluations.values())


def write_snapshots(results: Results, out: Path) -> None:
    """Write the figure of scores over the steps and its table."""
    points = score_points(results)
    write_csv(out / "tables" / "figure1.csv", flat_rows(points))
    curves = curves_of(results, (REWARD, K3_MASKED), window=window_of(results.all_runs()))
    save_svg_and_pdf(figure1(points, curves, results.arms), out / "figures" / "figure1.svg")


def score_points(results: Results) -> list[SnapshotPoint]:
    """Each arm's points: the untrained policy, every snapshot, and the last policy at its run's last step."""
    points = []
    for arm in results.arms:
        evaluation = results.evaluations[arm]
        done = {run.seed: len(run.metrics[STEP]) for run in results.runs[arm]}
        steps: dict[int, list[Score]] = {0: [results.base.scores[0]]}
        for kept in evaluation.snapshots:
            # A stop rule can end a run at a snapshot's step: then the snapshot is the last policy.
            if kept.step is not None and kept.step < done[kept.seed]:
                steps.setdefault(kept.step, []).append(kept)
        for score in evaluation.scores:
            steps.setdefault(done[score.seed], []).append(score)
        points += [SnapshotPoint(arm, step, len(steps[step]), _interval(steps[step])) for step in sorted(steps)]
    return points


def _interval(scores: Sequence[Score]) -> Interval:
    return crossed_interval(by_problem(tuple(scores))) if len(scores) > 1 else problem_interval(scores[0].correct_PK)


def figure1(points: Sequence[SnapshotPoint], curves: Sequence[Curve], arms: Sequence[str]) -> Figure:
    """Training reward, held-out score and KL over the steps, as in Figure 1 of arXiv 2512.23087."""
    with style():
        figure, (reward, score, kl) = make_panels(1, 3, 2.8)
        for ax, metric in ((reward, REWARD), (kl, K3_MASKED)):
            own = [curve for curve in curves if curve.metric == metric]
            draw_curves(ax, own, arms)
            if metric == K3_MASKED:
                set_magnitude_scale(ax, [value for curve in own for value in curve.mean_N])
        _draw_points(score, points, arms)
        for ax, title in ((reward, "training reward"), (score, "held-out avg@k"), (kl, "k3 KL, masked (nats)")):
            ax.set_title(title)
            ax.set_xlabel("training step")
        arm_legend(figure, arms)
    return figure


def _draw_points(ax: Axes, points: Sequence[SnapshotPoint], arms: Sequence[str]) -> None:
    """Lines through the means, bars for the intervals."""
    for arm, look in arm_styles(arms).items():
        own = [point for point in points if point.arm == arm]
        draw_intervals(ax, [point.step for point in own], [point.avg for point in own], look, width=1.2)
    set_percent_axis(ax, axis="y")
