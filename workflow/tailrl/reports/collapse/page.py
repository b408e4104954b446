"""The figure of runs that have not collapsed, over the steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.reports.axes import (
    arm_legend,
    arm_styles,
    make_panels,
    save_svg_and_pdf,
    say_nothing_to_show,
    set_marks,
    set_percent_axis,
    style,
)
from tailrl.reports.collapse.numbers import collapses, run_collapses, survival_curve


def write_collapse(results: Results, out: Path) -> None:
    """Write the figure of runs that have not collapsed, its table, and when each run collapsed."""
    rows = [row for arm in results.arms for row in survival_curve(arm, results.runs[arm])]
    write_csv(out / "tables" / "survival.csv", flat_rows(rows))
    write_csv(out / "tables" / "collapses.csv", flat_rows(run_collapses(results)))
    save_svg_and_pdf(survival_figure(results), out / "figures" / "survival.svg")


def survival_figure(results: Results) -> Figure:
    """Every arm's curve with its band; a sentence if no run collapsed."""
    curves = {arm: survival_curve(arm, results.runs[arm]) for arm in results.arms}
    collapsed = any(curve[0].collapsed for curve in curves.values())
    with style():
        figure, (ax,) = make_panels(1, 1, 2.6 if collapsed else 1.2)
        if not collapsed:
            told = any(curve[0].runs for curve in curves.values())
            say_nothing_to_show(ax, "No run of this study collapsed." if told else "No run can tell a collapse.")
            return figure
        for number, (arm, (colour, dash, marker)) in enumerate(arm_styles(results.arms).items()):
            end = max(collapses(results.runs[arm]).lengths, default=0)
            drawn = [*curves[arm], replace(curves[arm][-1], step=end)]
            step = [row.step for row in drawn]
            ax.step(step, [row.share for row in drawn], where="post", color=colour, linestyle=dash)
            band = [row.low for row in drawn], [row.high for row in drawn]
            # Most curves have few corners and lie on each other at 100 %: their markers stand at whole steps.
            whole = np.arange(end + 1)
            share = np.array([row.share for row in drawn])[np.searchsorted(step, whole, side="right") - 1]
            (marks,) = ax.plot(whole, share, color=colour, linestyle="none")
            set_marks(marks, marker, number, len(results.arms))
            ax.fill_between(step, *band, step="post", color=colour, alpha=0.15, linewidth=0)
        ax.set_ylim(-0.03, 1.03)
        set_percent_axis(ax, axis="y")
        ax.set_xlabel("training step")
        ax.set_ylabel("runs not collapsed")
        arm_legend(figure, results.arms)
        return figure
