"""Held-out scores of each arm, and differences between arms: tables, figures, words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.config.study import BASE_ARM
from tailrl.reports.arm_pairs import references
from tailrl.reports.axes import (
    GREY,
    arm_legend,
    arm_styles,
    make_panels,
    save_svg_and_pdf,
    say_nothing_to_show,
    set_magnitude_scale,
    set_percent_axis,
    style,
)
from tailrl.reports.page import render
from tailrl.reports.scores.numbers import (
    Comparison,
    Gain,
    PolicyScore,
    RunScore,
    compare_arms,
    gains_over_base,
    greedy_differences,
    greedy_scores,
    policy_scores,
    problem_rows,
    run_scores,
)
from tailrl.stats.intervals import LEVEL, Interval, problem_interval
from tailrl.stats.power import MOST


@dataclass(frozen=True, slots=True)
class Scores:
    """A study's held-out scores: of each arm, of each policy, and between arms."""

    gains: list[Gain]
    policies: list[PolicyScore]
    comparisons: list[Comparison]


def write_scores(results: Results, out: Path) -> Scores:
    """Write the figures and the tables of held-out scores; returns the numbers."""
    scores = Scores(gains_over_base(results), policy_scores(results), compare_arms(results, references(results)))
    write_csv(out / "tables" / "evaluation.csv", flat_rows(scores.gains))
    write_csv(out / "tables" / "policies.csv", flat_rows(scores.policies))
    write_csv(out / "tables" / "problems.csv.gz", problem_rows(results))
    if greedy := greedy_scores(results):
        write_csv(out / "tables" / "greedy.csv", flat_rows(greedy))
        differences = greedy_differences(results, references(results))
        write_csv(out / "tables" / "greedy_differences.csv", flat_rows(differences))
    write_csv(out / "tables" / "differences.csv", flat_rows(scores.comparisons))
    base_PK = results.base.scores[0].correct_PK
    figure = evaluation_figure(scores.gains, scores.policies, problem_interval(base_PK), base_PK.shape[1])
    save_svg_and_pdf(figure, out / "figures" / "evaluation.svg")
    runs = run_scores(results)
    write_csv(out / "tables" / "score_by_k3.csv", flat_rows(runs))
    figure = score_by_k3_figure(runs, results.arms, results.base.scores[0].avg_at_k, base_PK.shape[1])
    save_svg_and_pdf(figure, out / "figures" / "score_by_k3.svg")
    return scores


def evaluation_figure(gains: Sequence[Gain], policies: Sequence[PolicyScore], base: Interval, samples: int) -> Figure:
    """avg@k and pass@k of each arm: a dot per seed, the mean with its interval, base as a line.

    Args:
        gains: one per arm.
        policies: every evaluated policy, base among them.
        base: the untrained policy's avg@k with its interval over problems (the grey band).
        samples: k.
    """
    arms = [gain.arm for gain in gains]
    base_pass = next(policy.passed for policy in policies if policy.arm == BASE_ARM)
    with style():
        figure, (avg, passed) = make_panels(1, 2, 0.9 + 0.32 * len(arms))
        for place, (gain, (colour, _, marker)) in enumerate(zip(gains, arm_styles(arms).values(), strict=True)):
            own = [policy for policy in policies if policy.arm == gain.arm]
            avg.scatter([p.avg.mean for p in own], [place + 0.14] * len(own), s=9, color=colour, alpha=0.6)
            passed.scatter([p.passed for p in own], [place + 0.14] * len(own), s=9, color=colour, alpha=0.6)
            for ax, interval in ((avg, gain.avg), (passed, gain.passed)):
                ax.plot(interval.mean, place - 0.14, marker, markersize=4, color=colour)
                ax.hlines(place - 0.14, interval.low, interval.high, color=colour, linewidth=1)
        avg.axvspan(base.low, base.high, color=GREY, alpha=0.15, linewidth=0)
        for ax, value, name in ((avg, base.mean, f"avg@{samples}"), (passed, base_pass, f"pass@{samples}")):
            ax.axvline(value, color=GREY, linestyle="--", linewidth=1)
            _dress_scores(ax, name, len(arms))
        avg.set_yticks(range(len(arms)), arms)
        passed.set_yticks(range(len(arms)), [""] * len(arms))
        line = Line2D([], [], color=GREY, linestyle="--", linewidth=1)
        figure.legend([line], ["untrained policy"], loc="outside upper center")
    return figure


def score_by_k3_figure(runs: Sequence[RunScore], arms: Sequence[str], base: float, samples: int) -> Figure:
    """A dot for each run: its avg@k, and the size of its mismatch; the untrained policy's avg@k as a line."""
    with style():
        figure, (ax,) = make_panels(1, 1, 2.8)
        known = [run for run in runs if math.isfinite(run.k3)]
        if not known:
            say_nothing_to_show(ax, "No run recorded the size of its mismatch.")
            return figure
        for arm, (colour, _, marker) in arm_styles(arms).items():
            own = [run for run in known if run.arm == arm]
            ax.plot([run.avg for run in own], [run.k3 for run in own], marker, markersize=4, color=colour)
        ax.axvline(base, color=GREY, linestyle="--", linewidth=1)
        set_magnitude_scale(ax, [run.k3 for run in known])
        set_percent_axis(ax)
        ax.set_xlabel(f"avg@{samples} on held-out problems")
        ax.set_ylabel("mean k3 KL, unmasked (nats)")
        arm_legend(figure, arms, [run.arm for run in known])
    return figure


def _dress_scores(ax: Axes, name: str, arms: int) -> None:
    low, high = ax.get_xlim()
    ax.set_xlim(max(low, -0.02), min(high, 1.02))  # a t interval of few seeds can leave [0, 1]
    ax.set_ylim(arms - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    set_percent_axis(ax)
    ax.set_xlabel(f"{name} on held-out problems")


def comparison_table(comparisons: Sequence[Comparison], others: str) -> str:
    """The table of differences between arms, with a note; `others` is the file with all pairs."""
    return render("scores/comparisons.md.j2", comparisons=comparisons, others=others, power=_power, level=LEVEL)


def _power(comparison: Comparison) -> tuple[str, str]:
    """Seeds needed and the smallest detectable difference, in words; empty if the variance over seeds is unknown."""
    needed, least = comparison.seeds_needed, comparison.least_seen
    seeds = "" if math.isnan(needed) else f"{needed:.0f}" if math.isfinite(needed) else f"over {MOST:,}"
    return seeds, "" if math.isnan(least) else f"{100 * least:.1f}"
