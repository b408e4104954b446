"""Harm against k3, a line a cause: a table, a figure and a page, from the tables that the parts of `causes` left."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tailrl.analysis.harm import CausesPart, Harm, Numbers, harms
from tailrl.artifacts.tables import flat_rows, read_csv, write_csv
from tailrl.report.axes import arm_legend, arm_styles, make_panels, save_svg, style
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError


def write_harm(folders: Sequence[Path], out: Path) -> None:
    """Write out/harm.csv, out/harm.svg and out/harm.md.

    Args:
        folders: of each finished part's policies.csv and first_k3.csv.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: no part is finished, no arm has a control, or a table is missing or cannot be read.
    """
    if not folders:
        raise StudyError("no part is finished: run one, such as `make causes_1`")
    parts = [
        CausesPart(_numbers(folder / "policies.csv", "avg_mean"), _numbers(folder / "first_k3.csv", "k3"))
        for folder in folders
    ]
    if not (found := harms(parts)):
        raise StudyError(f"{folders[0]}: no arm has a matched control, <arm>_control")
    write_csv(out / "harm.csv", flat_rows(found))
    save_svg(harm_figure(found), out / "harm.svg")
    names = [(folder.parent if folder.name == "tables" else folder).name for folder in folders]
    (out / "harm.md").write_text(render("harm.md.j2", found=found, parts=names), encoding="utf-8")


def harm_figure(found: Sequence[Harm]) -> Figure:
    """Points of avg against k3 with their intervals, a line a cause; arms without a k3 are left out."""
    drawn = [one for one in found if one.k3.mean > 0]
    causes = list(dict.fromkeys(one.cause for one in found))
    looks = arm_styles(causes)
    with style():
        figure, (ax,) = make_panels(1, 1, 2.6)
        for cause in causes:
            colour, dash, marker = looks[cause]
            own = sorted((one for one in drawn if one.cause == cause), key=lambda one: one.k3.mean)
            x, y = [one.k3.mean for one in own], [100 * one.harm.mean for one in own]
            ax.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3, linewidth=0.8)
            known = [one for one in own if not math.isnan(one.harm.low)]
            low, high = ([100 * getattr(one.harm, end) for one in known] for end in ("low", "high"))
            ax.vlines([one.k3.mean for one in known], low, high, color=colour, linewidth=1)
        if drawn:
            ax.set_xscale("log")
        ax.axhline(0, color="grey", linewidth=0.6)
        ax.set_xlabel("k3 of the first ten steps, nats")
        ax.set_ylabel("avg@k less the control's, points")
        arm_legend(figure, causes)
    return figure


def _numbers(path: Path, column: str) -> Numbers:
    """A column of a part's table by arm; raises StudyError for a table that is none."""
    found = dict[str, list[float]]()
    try:
        for row in read_csv(path, ("arm", column)):
            found.setdefault(row["arm"], []).append(float(row[column] or "nan"))
    except ValueError:
        raise StudyError(f"{path}: a line's {column} is not a number") from None
    return found
