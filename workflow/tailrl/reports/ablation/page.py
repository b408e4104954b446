"""One ablation: score, collapses, KL, kept mass and tokens outside, for each value of a field."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tailrl.artifacts.claims import write_verdicts
from tailrl.artifacts.results import read_results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.config.study import Study
from tailrl.page_parts.number_text import LOST, with_interval
from tailrl.reports.ablation.endpoints import judge_ablation
from tailrl.reports.ablation.numbers import Point, points_of
from tailrl.reports.arm_pairs import ties
from tailrl.reports.axes import (
    GREY,
    MARK,
    Look,
    arm_legend,
    arm_styles,
    draw_intervals,
    make_panels,
    say_in_the_middle,
    set_magnitude_scale,
    set_percent_axis,
    style,
)
from tailrl.reports.course.numbers import reward_rows
from tailrl.reports.figures import caption
from tailrl.reports.page import render, write_page
from tailrl.reports.scores.numbers import compare_arms, problem_rows
from tailrl.reports.scores.page import comparison_table
from tailrl.runtime.errors import ConfigurationError
from tailrl.stats.intervals import Interval, problem_interval


def write_ablation(study: Study, name: str, results: Path, out: Path) -> None:
    """Write an ablation's page and tables into out/ablations.

    <name>.html and .md are the page, .svg is its figure and .csv its table. <name>_claims.csv has the verdicts,
    <name>_differences.csv the differences between all of the ablation's arms, <name>_problems.csv.gz and
    <name>_rewards.csv.gz the scores by problem and the rewards by step.

    Raises:
        StudyError: a result is missing, unreadable or empty, or the study has no such ablation.
    """
    if name not in study.ablations:
        raise ConfigurationError(f"study {study.name!r} has no ablation {name!r}")
    ablation, arms, folder = study.ablations[name], study.ablation_arms(name), out / "ablations"
    read = read_results(study, results, arms)
    values = ["null" if value is None else str(value) for value in ablation.values]
    places = itertools.product(ablation.bases, values)
    points_A = points_of(read, [(base, arm, value) for arm, (base, value) in zip(arms, places, strict=True)])
    untrained = problem_interval(read.base.scores[0].correct_PK)
    samples = read.base.scores[0].correct_PK.shape[1]
    write_csv(folder / f"{name}.csv", flat_rows(points_A))
    write_csv(folder / f"{name}_problems.csv.gz", problem_rows(read))
    write_csv(folder / f"{name}_rewards.csv.gz", reward_rows(read))
    verdicts = judge_ablation(ablation, read, points_A)
    write_verdicts(folder / f"{name}_claims.csv", verdicts)
    comparisons = compare_arms(read, ties(read))
    write_csv(folder / f"{name}_differences.csv", flat_rows(comparisons))
    further = itertools.groupby(verdicts[len(ablation.bases) :], key=lambda verdict: verdict.endpoint)
    tied = [comparison for comparison in comparisons if comparison.why]
    words = render(
        "ablation/page.md.j2",
        name=name,
        ablation=ablation,
        seeds=sorted({point.runs for point in points_A}),
        untrained=untrained,
        samples=samples,
        LOST=LOST,
        nats=_nats,
        points_A=points_A,
        verdicts=[(endpoint, list(lines)) for endpoint, lines in further],
        compared=comparison_table(tied, f"{name}_differences.csv") if tied else "",
    )
    figure = ablation_figure(points_A, untrained, ablation.field, samples, list(study.arms))
    behind = (f"{name}.csv", f"{name}_claims.csv", f"{name}_differences.csv")
    write_page(folder / name, words, figure, caption("ablation"), behind)


def ablation_figure(
    points_A: Sequence[Point], untrained: Interval, field: str, samples: int, arms: Sequence[str]
) -> Figure:
    """Six panels over the values, with a line for each base arm; grey is the untrained policy. Values are evenly
    spaced: numbers in ascending order, others in the study's order. `arms` are the study's, which give the looks."""
    points_A = _ascending(points_A)
    looks = arm_styles(arms)
    bases, values = (list(dict.fromkeys(getattr(p, name) for p in points_A)) for name in ("base", "value"))
    with style():
        figure, panels = make_panels(3, 2, 6.0 + 0.2 * (len(bases) > 1))
        score, survived, k3_unmasked, k3_masked, lost, outside = panels
        score.axhspan(untrained.low, untrained.high, color=GREY, alpha=0.15, linewidth=0)
        score.axhline(untrained.mean, color=GREY, linestyle="--", linewidth=1)
        titles = {
            "avg": f"avg@{samples}, held-out (dashed: untrained policy)",
            "survived": "steps before the collapse, or all",
            "k3_unmasked": "mean k3 of full policies, sampled tokens (nats)",
            "k3_masked": "mean k3 on the safe sets, sampled tokens (nats)",
            "lost": "mass outside the set, mean 1 − Z",
            "outside": "sampled tokens outside the trainer's set",
        }
        for ax, (name, title) in zip(panels, titles.items(), strict=True):
            for i, base in enumerate(bases):
                own = [p for p in points_A if p.base == base]
                shift = min(0.12, 0.6 / len(bases)) * (i - (len(bases) - 1) / 2)
                _draw(ax, [getattr(p, name) for p in own], looks[base], shift=shift)
            ax.set_title(title)
            ax.set_xticks(range(len(values)), values)
            ax.set_xlim(-0.5, len(values) - 0.5)
        set_percent_axis(score, axis="y")
        low, high = score.get_ylim()
        score.set_ylim(max(low, -0.02), min(high, 1.02))  # a t interval of few seeds can leave [0, 1]
        longest = np.nanmax([1.0, *(p.survived.mean for p in points_A)])
        survived.set_ylim(0, 1.05 * longest)  # an interval can exceed the run's steps
        for ax, name in ((k3_unmasked, "k3_unmasked"), (k3_masked, "k3_masked"), (lost, "lost"), (outside, "outside")):
            set_magnitude_scale(ax, [getattr(p, name).mean for p in points_A])
            if name in ("lost", "outside") and ax.get_yscale() == "linear":
                set_percent_axis(ax, axis="y")
                ax.set_ylim(bottom=0)
        for ax in (lost, outside):
            ax.set_xlabel(field)
        if len(bases) > 1:
            arm_legend(figure, arms, bases)
    return figure


def _ascending(points_A: Sequence[Point]) -> Sequence[Point]:
    """Sorted by value if all values are numbers; otherwise in the study's order."""
    try:
        return sorted(points_A, key=lambda p: float(p.value))
    except ValueError:
        return points_A


def _draw(ax: Axes, intervals: Sequence[Interval], look: Look, *, shift: float) -> None:
    if all(math.isnan(i.mean) for i in intervals):
        say_in_the_middle(ax)
    x = [place + shift for place in range(len(intervals))]
    draw_intervals(ax, x, intervals, look, mark=MARK)


def _nats(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "not recorded"
    number = "{:.2g}".format
    return number(interval.mean) if interval.low == interval.high else with_interval(interval, number)
