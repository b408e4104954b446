"""The parts of a study together: tables, a page and, where asked for, a figure, from the tables that they left."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.config.pooled import SCORE_TABLE, Pool, PoolFigure
from tailrl.config.results import whole_and_part
from tailrl.config.study import Study
from tailrl.page_parts.number_text import p_value, percent, points, with_interval
from tailrl.reports.axes import Look, arm_legend, arm_styles, make_panels, save_svg, style
from tailrl.reports.page import render
from tailrl.reports.parts.numbers import (
    POOLED_SCORE,
    PooledChange,
    PooledEquivalence,
    PooledLine,
    PooledMeasure,
    pooled_changes,
    pooled_equivalences,
    pooled_lines,
    pooled_measures,
    pooled_slopes,
)
from tailrl.reports.parts.tables import read_parts
from tailrl.runtime.errors import ConfigurationError
from tailrl.stats.intervals import Interval
from tailrl.stats.tests import Difference

PlacedMean = tuple[float, float, float, float]
"""x, and a mean with the ends of its interval."""


def write_pooled(study: Study, folders: Sequence[Path], out: Path) -> None:
    """Write the files of `Pool.outputs` into the folder `out`.

    Args:
        study: with parts, and `pooled`.
        folders: of each finished part's tables.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: no part is finished, or a table cannot be read.
    """
    pool = study.pooled
    if pool is None:
        raise ConfigurationError(f"{study.name}: says nothing under pooled")
    names = [whole_and_part(name)[1] for name in study.pooled_parts]
    parts = read_parts(pool, names, folders)
    lines = pooled_lines(pool, parts)
    equivalences = pooled_equivalences(pool, parts, lines)
    measures = pooled_measures(pool, parts)
    changes = pooled_changes(pool, parts)
    slopes = pooled_slopes(pool, parts)
    write_csv(out / "comparisons.csv", flat_rows(lines))
    write_csv(out / "measures.csv", flat_rows(measures))
    if equivalences:
        write_csv(out / "equivalence.csv", flat_rows(equivalences))
    if pool.against:
        write_csv(out / "changes.csv", flat_rows(changes))
    if pool.slopes:
        write_csv(out / "slopes.csv", flat_rows(slopes))
    if pool.figure:
        save_svg(pooled_figure(pool, pool.figure, lines, measures), out / "pooled.svg")
    levels = {(one.family, one.arm, one.minus): one for one in equivalences}
    page = render(
        "parts/page.md.j2",
        pool=pool,
        score=POOLED_SCORE,
        parts=list(parts),
        missing=[part for part in names if part not in parts],
        families={
            family: [
                _cells(pool, line, levels.get((family, line.arm, line.minus)))
                for line in lines
                if line.family == family
            ]
            for family in pool.families
        },
        tables=list(_tables(pool, measures, changes)),
        slopes=[[one.measure, one.against, one.arm, _text(one.slope), one.slope.n] for one in slopes],
    )
    (out / "pooled.md").write_text(page, encoding="utf-8")


def pooled_figure(
    pool: Pool, figure: PoolFigure, lines: Sequence[PooledLine], measures: Sequence[PooledMeasure]
) -> Figure:
    """Panels of means with their intervals against a measure; measures that are not above 0 are left out."""
    x = {(one.part, one.arm): one.value.mean for one in measures if one.measure == figure.x}
    drawn = [list(_points(pool, panel, x, lines, measures)) for panel in figure.panels]
    names = list(dict.fromkeys(group for panel in drawn for group, _ in panel))
    with style():
        made, panels = make_panels(1, len(drawn), 2.6)
        for ax, panel, found in zip(panels, figure.panels, drawn, strict=True):
            _draw(ax, found, arm_styles(names))
            ax.set_xlabel(figure.x)
            if panel[0] in pool.families:
                ax.axhline(0, color="grey", linewidth=0.6)
                ax.set_ylabel(f"difference in {POOLED_SCORE}, points")
            else:
                ax.set_ylabel(", ".join(panel))
                if found and all(low > 0 for _, (_, _, low, _) in found if not math.isnan(low)):
                    ax.set_yscale("log")
                    _label_log(ax.yaxis, [mean for _, (_, mean, _, _) in found])
        arm_legend(made, names)
    return made


def _points(
    pool: Pool,
    panel: Sequence[str],
    x: Mapping[tuple[str, str], float],
    lines: Sequence[PooledLine],
    measures: Sequence[PooledMeasure],
) -> Iterator[tuple[str, PlacedMean]]:
    """A panel's points with the line that they are on: an arm over the parts, or a cause over its arms."""
    values: list[tuple[str, str, Difference | Interval, int]]
    values = [(one.part, one.arm, one.difference, 100) for one in lines if one.family in panel]
    values += [(one.part, one.arm, one.value, 1) for one in measures if one.measure in panel]
    for part, arm, value, unit in values:
        mean, low, high = (unit * end for end in (value.mean, value.low, value.high))
        if (at := x.get((part, arm), 0.0)) > 0 and (mean > 0 or panel[0] in pool.families):
            yield arm if pool.unit == "seed" else arm.rpartition("_")[0] or "engine", (at, mean, low, high)


def _draw(ax: Axes, found: Sequence[tuple[str, PlacedMean]], looks: Mapping[str, Look]) -> None:
    for group in dict.fromkeys(group for group, _ in found):
        colour, dash, marker = looks[group]
        own = sorted(point for name, point in found if name == group)
        x, mean = [point[0] for point in own], [point[1] for point in own]
        ax.plot(x, mean, color=colour, linestyle=dash, marker=marker, markersize=3, linewidth=0.8)
        known = [point for point in own if not math.isnan(point[2])]
        ax.vlines(
            [at for at, *_ in known],
            [low for *_, low, _ in known],
            [high for *_, high in known],
            color=colour,
            linewidth=1,
        )
    if found:
        ax.set_xscale("log")
        _label_log(ax.xaxis, [x for _, (x, *_) in found])


def _label_log(axis: Axis, values: Sequence[float]) -> None:
    """Labels at powers of ten, and where they are few at twice and five times those."""
    axis.set_major_locator(LogLocator(subs=(1.0,) if max(values) > 100 * min(values) else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _cells(pool: Pool, line: PooledLine, level: PooledEquivalence | None) -> list[str]:
    """A line of the page's table: the arm, where, the sum of others, the difference, p, and the range within parts.

    In a family with margins the 90 % interval, the margin and the verdict follow.
    """
    ends = [line.least, line.most] if line.counts else []
    return [
        line.arm,
        *([line.part] if pool.unit == "seed" else []),
        line.minus,
        points(line.difference) if line.counts else "the measures differ",
        p_value(line.difference_p_holm) if line.counts else "",
        *([" to ".join(f"{100 * end:+.1f}" for end in ends if not math.isnan(end))] if pool.unit == "part" else []),
        *(_level_cells(level) if pool.families[line.family].margins else []),
    ]


def _level_cells(level: PooledEquivalence | None) -> list[str]:
    if level is None:
        return ["", "", ""]
    return [points(level.difference), f"±{100 * level.margin:g}", level.verdict]


def _tables(
    pool: Pool, measures: Sequence[PooledMeasure], changes: Sequence[PooledChange]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Tables of arms with their titles and columns: of all measures, or for each measure of all parts."""
    cells = {(one.arm, one.part, one.measure): _cell(pool, one) for one in measures}
    for change in changes:
        cells[change.arm, change.part, change.measure] += f" (p {p_value(change.change_p_holm)})"
    names = list(dict.fromkeys(one.measure for one in measures))
    arms = list(dict.fromkeys(one.arm for one in measures))
    parts = list(dict.fromkeys(one.part for one in measures))
    if pool.unit == "part":
        yield "Measures", names, [[arm, *(cells.get((arm, "", name), "") for name in names)] for arm in arms]
        return
    for name in names:
        rows = [[arm, *(cells.get((arm, part, name), "") for part in parts)] for arm in arms]
        yield name, parts, [row for row in rows if any(row[1:])]


def _cell(pool: Pool, one: PooledMeasure) -> str:
    if math.isnan(one.value.mean):
        return ""
    is_score = one.measure == POOLED_SCORE or pool.measures[one.measure].table == SCORE_TABLE
    return percent(one.value) if is_score else _text(one.value)


def _text(value: Interval) -> str:
    return "" if math.isnan(value.mean) else with_interval(value)
