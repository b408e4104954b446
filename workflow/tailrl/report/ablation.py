"""One ablation: final score, KL, kept mass and tokens outside against the values that a field takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tailrl.errors import StudyError
from tailrl.report.axes import ARM_COLOURS, GREY, make_panels, save_svg, set_magnitude_scale, set_percent_axis, style
from tailrl.report.data import Results, read_results
from tailrl.report.statistics import Difference, Interval, mean_interval, problem_interval
from tailrl.report.summary import count, percent, points, table
from tailrl.report.tables import flat_rows, gain_over_base, mean_of, write_csv
from tailrl.study import Study


@dataclass(frozen=True, slots=True)
class Point:
    """What one value of the field led to: means over seeds with t intervals.

    Attributes:
        value: the value as text.
        avg: avg@k, share of 1; gain: over base, paired over problems.
        k3_masked, k3_unmasked: nats per token, mean over all steps.
        lost: 1 - Z, mean mass outside the trainer's safe set.
        outside: share of sampled tokens outside the trainer's set.
    """

    arm: str
    value: str
    avg: Interval
    gain: Difference
    k3_masked: Interval
    k3_unmasked: Interval
    lost: Interval
    outside: Interval


def write(study: Study, name: str, results: Path, folder: Path) -> None:
    """Writes folder/<name>.csv, .svg and .md; raises StudyError where a result or the ablation is missing."""
    if name not in study.ablations:
        raise StudyError(f"study {study.name!r} has no ablation {name!r}")
    arms = study.ablation_arms(name)
    read = read_results(study, results, arms)
    values = ["null" if value is None else str(value) for value in study.ablations[name].values]
    points_V = [_point(read, arm, value) for arm, value in zip(arms, values, strict=True)]
    base = problem_interval(read.base.scores[0].correct_PK)
    samples = read.base.scores[0].correct_PK.shape[1]
    write_csv(folder / f"{name}.csv", flat_rows(points_V))
    save_svg(ablation_figure(points_V, base, study.ablations[name].field, samples), folder / f"{name}.svg")
    (folder / f"{name}.md").write_text(_page(study, name, points_V, base, samples), encoding="utf-8")


def ablation_figure(points_V: Sequence[Point], base: Interval, field: str, samples: int) -> Figure:
    """Four panels over the values, evenly spaced in the study's order; base is the grey line and band."""
    with style():
        figure, (score, k3, lost, outside) = make_panels(2, 2, 4.2)
        score.axhspan(base.low, base.high, color=GREY, alpha=0.15, linewidth=0)
        score.axhline(base.mean, color=GREY, linestyle="--", linewidth=1)
        _draw(score, [p.avg for p in points_V], ARM_COLOURS[0], "")
        set_percent_axis(score, axis="y")
        low, high = score.get_ylim()
        score.set_ylim(max(low, -0.02), min(high, 1.02))  # a t interval of few seeds can leave [0, 1]
        _draw(k3, [p.k3_masked for p in points_V], ARM_COLOURS[0], "masked", shift=-0.06)
        _draw(k3, [p.k3_unmasked for p in points_V], ARM_COLOURS[1], "unmasked", shift=0.06)
        _draw(lost, [p.lost for p in points_V], ARM_COLOURS[0], "")
        _draw(outside, [p.outside for p in points_V], ARM_COLOURS[0], "")
        set_magnitude_scale(k3, [i.mean for p in points_V for i in (p.k3_masked, p.k3_unmasked)])
        for ax, shares in ((lost, [p.lost.mean for p in points_V]), (outside, [p.outside.mean for p in points_V])):
            set_magnitude_scale(ax, shares)
            if ax.get_yscale() == "linear":
                set_percent_axis(ax, axis="y")
        score.set_title(f"avg@{samples}, held-out (dashed: untrained policy)")
        k3.set_title("mean k3 KL (nats)")
        lost.set_title("mass outside the set, mean 1 − Z")
        outside.set_title("sampled tokens outside the trainer's set")
        for ax in (score, k3, lost, outside):
            ax.set_xticks(range(len(points_V)), [p.value for p in points_V])
            ax.set_xlim(-0.5, len(points_V) - 0.5)
        for ax in (lost, outside):
            ax.set_xlabel(field)
        k3.legend(fontsize=7)
    return figure


def _draw(ax: Axes, intervals: Sequence[Interval], colour: str, label: str, *, shift: float = 0.0) -> None:
    if all(math.isnan(i.mean) for i in intervals):
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color=GREY)
    x = [place + shift for place in range(len(intervals))]
    ax.plot(x, [i.mean for i in intervals], color=colour, marker="o", markersize=3.5, linewidth=0.8, label=label)
    ax.vlines(x, [i.low for i in intervals], [i.high for i in intervals], color=colour, linewidth=1)


def _point(results: Results, arm: str, value: str) -> Point:
    runs, gain = results.runs[arm], gain_over_base(results, arm)
    means = {
        "k3_masked": mean_of(runs, "rollout_corr/k3_kl"),
        "k3_unmasked": mean_of(runs, "rollout_corr_unmasked/k3_kl"),
        "lost": 1.0 - mean_of(runs, "dvp/kept_mass_train_mean"),
        "outside": mean_of(runs, "dvp/sampled_outside_train_support_fraction"),
    }
    return Point(arm, value, gain.avg, gain.gain, **{name: mean_interval(values) for name, values in means.items()})


def _page(study: Study, name: str, points_V: Sequence[Point], base: Interval, samples: int) -> str:
    ablation = study.ablations[name]
    scores = (f"avg@{samples}", "gain over base, points")
    header = (ablation.field, *scores, "k3 masked", "k3 unmasked", "1 − Z", "outside")
    rows = [
        [p.value, percent(p.avg), points(p.gain), *(_nats(i) for i in (p.k3_masked, p.k3_unmasked, p.lost, p.outside))]
        for p in points_V
    ]
    note = (
        f"Arm `{ablation.base}` with other values of `{ablation.field}`, {count(len(study.seeds), 'seed')} each. The "
        f"untrained policy has {percent(base)} (interval over problems). avg and the means over all steps have the "
        "95 % t interval over seeds, the gain is paired over problems."
    )
    return f"# Ablation {name}\n\n{note}\n\n{table(header, rows)}\n"


def _nats(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "not recorded"
    if math.isnan(interval.low) or interval.low == interval.high:
        return f"{interval.mean:.2g}"
    return f"{interval.mean:.2g} [{interval.low:.2g}, {interval.high:.2g}]"
