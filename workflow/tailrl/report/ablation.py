"""One ablation: final score, collapses, KL, kept mass and tokens outside against the values that a field takes."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tailrl.analysis import arm_kinds
from tailrl.analysis.format import LOST
from tailrl.analysis.scores import Gain, by_problem, compare_arms, gains_over_base
from tailrl.analysis.survival import collapses, lasted
from tailrl.analysis.tables import flat_rows, mean_of, write_csv
from tailrl.artifacts.results import Results, TrainedRun, read_results
from tailrl.artifacts.tables import write_claims
from tailrl.claims.ablation import Point, ablation_verdicts
from tailrl.config.study import Study
from tailrl.report.axes import (
    GREY,
    Dash,
    arm_legend,
    arm_styles,
    make_panels,
    save_svg,
    say_in_the_middle,
    set_magnitude_scale,
    set_percent_axis,
    style,
)
from tailrl.report.page import render
from tailrl.report.summary import comparison_table
from tailrl.runtime.errors import StudyError
from tailrl.stats.crossed import crossed_difference
from tailrl.stats.intervals import Interval, mean_interval, problem_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, holm
from tailrl.tracking.metrics import K3_MASKED, K3_UNMASKED, KEPT_MASS_TRAIN, OUTSIDE


def write(study: Study, name: str, results: Path, folder: Path) -> None:
    """Writes folder/<name>.csv, .svg, .md, with the verdict on the field <name>_claims.csv, and with the differences
    between all of its arms, across values too, <name>_differences.csv.

    Raises:
        StudyError: a result or the ablation is missing.
    """
    if name not in study.ablations:
        raise StudyError(f"study {study.name!r} has no ablation {name!r}")
    ablation, arms = study.ablations[name], study.ablation_arms(name)
    read = read_results(study, results, arms)
    values = ["null" if value is None else str(value) for value in ablation.values]
    places = itertools.product(ablation.bases, values)
    points_A = _points(read, [(base, arm, value) for arm, (base, value) in zip(arms, places, strict=True)])
    untrained = problem_interval(read.base.scores[0].correct_PK)
    samples = read.base.scores[0].correct_PK.shape[1]
    write_csv(folder / f"{name}.csv", flat_rows(points_A))
    verdicts = ablation_verdicts(ablation, read, points_A)
    write_claims(folder / f"{name}_claims.csv", verdicts)
    comparisons = compare_arms(read, arm_kinds.ties(read))
    write_csv(folder / f"{name}_differences.csv", flat_rows(comparisons))
    save_svg(ablation_figure(points_A, untrained, ablation.field, samples), folder / f"{name}.svg")
    further = itertools.groupby(verdicts[len(ablation.bases) :], key=lambda verdict: verdict.endpoint)
    tied = [comparison for comparison in comparisons if comparison.why]
    page = render(
        "ablation.md.j2",
        name=name,
        ablation=ablation,
        seeds=study.seeds,
        untrained=untrained,
        samples=samples,
        LOST=LOST,
        nats=_nats,
        points_A=points_A,
        verdicts=[(endpoint, list(lines)) for endpoint, lines in further],
        compared=comparison_table(tied, f"{name}_differences.csv") if tied else "",
    )
    (folder / f"{name}.md").write_text(page, encoding="utf-8")


def ablation_figure(points_A: Sequence[Point], untrained: Interval, field: str, samples: int) -> Figure:
    """Six panels over the values, evenly spaced, numbers in ascending and all else in the study's order, a line a base
    arm; grey: the untrained policy."""
    points_A = _ascending(points_A)
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
            for i, (base, (colour, dash)) in enumerate(arm_styles(bases).items()):
                own = [p for p in points_A if p.base == base]
                shift = 0.12 * (i - (len(bases) - 1) / 2) / max(len(bases) - 1, 1)
                _draw(ax, [getattr(p, name) for p in own], colour, dash, shift=shift)
            ax.set_title(title)
            ax.set_xticks(range(len(values)), values)
            ax.set_xlim(-0.5, len(values) - 0.5)
        set_percent_axis(score, axis="y")
        low, high = score.get_ylim()
        score.set_ylim(max(low, -0.02), min(high, 1.02))  # a t interval of few seeds can leave [0, 1]
        longest = np.nanmax([1.0, *(p.survived.mean for p in points_A)])
        survived.set_ylim(0, 1.05 * longest)  # likewise
        for ax, name in ((k3_unmasked, "k3_unmasked"), (k3_masked, "k3_masked"), (lost, "lost"), (outside, "outside")):
            set_magnitude_scale(ax, [getattr(p, name).mean for p in points_A])
            if name in ("lost", "outside") and ax.get_yscale() == "linear":
                set_percent_axis(ax, axis="y")
                ax.set_ylim(bottom=0)
        for ax in (lost, outside):
            ax.set_xlabel(field)
        if len(bases) > 1:
            arm_legend(figure, bases)
    return figure


def _ascending(points_A: Sequence[Point]) -> Sequence[Point]:
    """By value where all values are numbers, which are drawn as an axis; base arms in the study's order."""
    try:
        return sorted(points_A, key=lambda p: float(p.value))
    except ValueError:
        return points_A


def _draw(ax: Axes, intervals: Sequence[Interval], colour: str, dash: Dash, *, shift: float) -> None:
    if all(math.isnan(i.mean) for i in intervals):
        say_in_the_middle(ax)
    x = [place + shift for place in range(len(intervals))]
    ax.plot(x, [i.mean for i in intervals], color=colour, linestyle=dash, marker="o", markersize=3.5, linewidth=0.8)
    ax.vlines(x, [i.low for i in intervals], [i.high for i in intervals], color=colour, linewidth=1)


def _points(results: Results, places: Sequence[tuple[str, str, str]]) -> list[Point]:
    """The points of base, arm and value, with each arm's change against the one that its base starts from."""
    gains = {gain.arm: gain for gain in gains_over_base(results)}
    scores = {arm: by_problem(results.evaluations[arm].scores) for _, arm, _ in places}
    changes = []
    for base, arm, _ in places:
        own = [other for of, other, _ in places if of == base]
        start = base if base in own else own[0]
        changes.append(crossed_difference(scores[arm], scores[start]) if arm != start else NO_DIFFERENCE)
    adjusted = holm([change.p for change in changes]).tolist()
    return [
        _point(results.runs[arm], base, gains[arm], value, change, p)
        for (base, arm, value), change, p in zip(places, changes, adjusted, strict=True)
    ]


def _point(runs: Sequence[TrainedRun], base: str, gain: Gain, value: str, change: Difference, change_p: float) -> Point:
    steps, _ = found = collapses(runs)
    seeds = {
        "k3_masked": mean_of(runs, K3_MASKED),
        "k3_unmasked": mean_of(runs, K3_UNMASKED),
        "lost": 1.0 - mean_of(runs, KEPT_MASS_TRAIN),
        "outside": mean_of(runs, OUTSIDE),
        "survived": lasted(found),
    }
    return Point(
        base=base,
        arm=gain.arm,
        value=value,
        avg=gain.avg,
        gain=gain.gain,
        change=change,
        change_p_holm=change_p,
        runs=len(steps),
        collapsed=sum(step is not None for step in steps),
        **{name: mean_interval(values) for name, values in seeds.items()},
    )


def _nats(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "not recorded"
    if math.isnan(interval.low) or interval.low == interval.high:
        return f"{interval.mean:.2g}"
    return f"{interval.mean:.2g} [{interval.low:.2g}, {interval.high:.2g}]"
