"""Engines' whole distributions against the trainer's: tables as CSV, a page and a figure."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from tailrl.artifacts.claims import Verdict, write_verdicts
from tailrl.artifacts.probes import DistributionsRecord
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.page_parts.number_text import short, with_interval
from tailrl.reports.axes import (
    GREY,
    arm_legend,
    arm_styles,
    make_panels,
    say_nothing_to_show,
    set_magnitude_scale,
    style,
)
from tailrl.reports.distributions import FLIP_TABLES, TABLES
from tailrl.reports.distributions.endpoints import judge_distributions
from tailrl.reports.distributions.flips import NARROW, LayerFlips, flips_by_layer, flips_by_margin, flips_by_problem
from tailrl.reports.distributions.numbers import (
    Compared,
    Distance,
    HistogramBin,
    ProbabilityBin,
    SetOverlap,
    Signature,
    distance,
    histograms,
    probability_bins,
    read_compared,
    set_overlaps,
    signature,
)
from tailrl.reports.figures import caption
from tailrl.reports.page import render, write_page
from tailrl.reports.what_ran import made_by
from tailrl.stats.intervals import Interval

MARKERS = ("o", "D", "s", "^", "v", "P", "X", "<", ">", "*")
"""The markers of the thresholds in the panel of the safe sets."""

ABOVE = 0.3
"""The upper share of a histogram's panel, with the rows of modes and means."""

LEAST = 1e-6
"""Bins below this share of the highest density do not widen the axes."""

Spread = tuple[float, float, float]
"""Mean, 1st and 99th percentile over positions."""


def write_distribution_report(results: Path, engines: Sequence[str], out: Path) -> None:
    """Write distributions.{csv,md,html,svg} and {safe_sets,probability,histograms,signature,claims}.csv into out.

    Where an engine said which experts it chose there are flips_by_{layer,margin}.csv and flips_by_problem.csv.gz too.

    Args:
        results: holds a folder for each engine, with positions.npz and run.json.
        engines: the reported engines, in this order.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: one of these files is missing or cannot be used.
    """
    compared = [read_compared(results / engine, engine) for engine in engines]
    distances = [distance(one) for one in compared]
    overlaps = [row for one in compared for row in set_overlaps(one)]
    bins = [row for one in compared for row in probability_bins(one)]
    shapes = [row for one in compared for row in histograms(one)]
    signatures = [row for one in compared for row in signature(one)]
    by_layer = [row for one in compared for row in flips_by_layer(one)]
    tables: dict[str, Sequence[object]] = {
        "distributions.csv": distances,
        "safe_sets.csv": overlaps,
        "probability.csv": bins,
        "histograms.csv": shapes,
        "signature.csv": signatures,
    }
    flips: dict[str, Sequence[object]] = {
        "flips_by_layer.csv": by_layer,
        "flips_by_margin.csv": [row for one in compared for row in flips_by_margin(one)],
        "flips_by_problem.csv.gz": [row for one in compared for row in flips_by_problem(one)],
    }
    for name, rows in (tables | flips if by_layer else tables).items():
        write_csv(out / name, flat_rows(rows))
    verdicts = judge_distributions(compared)
    write_verdicts(out / "claims.csv", verdicts)
    words = _page(compared, verdicts, distances, overlaps, signatures, by_layer)
    figure = distribution_figure(distances, overlaps, bins, shapes, signatures)
    behind = (*TABLES, *FLIP_TABLES) if by_layer else TABLES
    write_page(out / "distributions", words, figure, caption("distributions"), behind)


def distribution_figure(
    distances: Sequence[Distance], overlaps: Sequence[SetOverlap], bins: Sequence[ProbabilityBin],
    shapes: Sequence[HistogramBin], signatures: Sequence[Signature],
) -> Figure:  # fmt: skip
    """Six panels: total variation and overlap by engine; size and sign of Δ by probability; Δ in head and tail."""
    engines = [one.engine for one in distances]
    with style():
        figure, (tv, overlap, size, balance, head, tail) = make_panels(3, 2, 6.6)
        _draw_rows(tv, [[(one.tv.mean, one.tv_p01, one.tv_p99)] for one in distances], distances)
        tv.set_xlabel("total variation at a position")
        missing = [[_missing(row) for row in overlaps if row.engine == engine] for engine in engines]
        _draw_rows(overlap, missing, distances)
        overlap.set_xlabel("1 − |V_S ∩ V'_S| / |V_S| at a position")
        rhos = dict.fromkeys(row.rho for row in overlaps)
        marks = [Line2D([], [], color=GREY, linestyle="", marker=m) for m, _ in zip(MARKERS, rhos, strict=False)]
        overlap.legend(marks, [f"ρ = {rho}" for rho in rhos], loc="best", fontsize=7)
        _draw_bins(size, balance, bins, engines)
        for ax, part in ((head, "head"), (tail, "tail")):
            own = [row for row in signatures if row.part == part]
            _draw_histogram(ax, [row for row in shapes if row.part == part], own, engines)
        head.set_title(f"head: −ln π_train < {signatures[0].nats_to:g}")
        tail.set_title(f"tail: −ln π_train ≥ {signatures[-1].nats_from:g}")
        arm_legend(figure, engines)
    return figure


def _missing(row: SetOverlap) -> Spread:
    """1 minus the overlap."""
    return 1 - row.overlap.mean, 1 - row.overlap_p99, 1 - row.overlap_p01


def _draw_rows(ax: Axes, spreads: Sequence[Sequence[Spread]], distances: Sequence[Distance]) -> None:
    """A row for each engine: the mean as a mark, 1st to 99th percentile as a line; zeros as words on the log axis."""
    engines = [one.engine for one in distances]
    ends = [low or mean for row in spreads for mean, low, _ in row if mean]
    ax.set_yticks(range(len(engines)), engines)
    ax.set_ylim(len(engines) - 0.5, -0.5)
    if ends:
        ax.set_xscale("log")
        lowest = 10.0 ** math.floor(math.log10(min(ends)))
        ax.set_xlim(lowest, 1)
    for place, (row, (colour, *_)) in enumerate(zip(spreads, arm_styles(engines).values(), strict=True)):
        if not any(mean for mean, *_ in row):
            words = f"exactly 0 at all {distances[place].positions:,} positions"
            ax.text(0.03, place, words, transform=ax.get_yaxis_transform(), va="center", color=colour, fontsize=7)
            continue
        for index, ((mean, low, high), marker) in enumerate(zip(row, MARKERS, strict=False)):
            y = place + 0.28 * (index - (len(row) - 1) / 2)
            if not mean:
                ax.text(0.03, y, "0", transform=ax.get_yaxis_transform(), va="center", color=colour, fontsize=7)
                continue
            ax.plot([max(low, lowest), max(high, lowest)], [y, y], color=colour, linewidth=1)
            ax.plot(mean, y, color=colour, marker=marker, markersize=4)


def _draw_bins(size: Axes, balance: Axes, bins: Sequence[ProbabilityBin], engines: Sequence[str]) -> None:
    """Draw mean |Δ|, and mean −Δ / mean |Δ|, against −ln π_train, for engines with a mismatch."""
    edges = sorted({b.nats_from for b in bins})
    drawn: list[float] = []
    for index, (engine, (colour, dash, _)) in enumerate(arm_styles(engines).items()):
        own = [b for b in bins if b.engine == engine and b.size.mean > 0]
        x = [edges.index(b.nats_from) + (index + 1) / (len(engines) + 1) for b in own]
        for ax, field in ((size, "size"), (balance, "balance")):
            intervals: list[Interval] = [getattr(b, field) for b in own]
            ax.plot(x, [i.mean for i in intervals], color=colour, linestyle=dash, marker=".", markersize=3)
            ax.vlines(x, [i.low for i in intervals], [i.high for i in intervals], colour, linewidth=0.5)
        drawn += [b.size.mean for b in own]
    set_magnitude_scale(size, drawn)
    size.set_ylabel("mean |Δ| (nats)")
    balance.axhline(0, color=GREY, linewidth=0.8)
    balance.set_ylim(-1, 1)
    balance.set_ylabel("mean −Δ / mean |Δ|")
    for ax in (size, balance):
        ax.set_xticks(range(0, len(edges), 2), [f"{edge:g}" for edge in edges[::2]])
        ax.set_xlabel("−ln π_train of the token (nats)")


def _draw_histogram(
    ax: Axes, shapes: Sequence[HistogramBin], rows: Sequence[Signature], engines: Sequence[str]
) -> None:
    """Draw the density of −Δ / ε_max over the tokens that each engine samples, for engines with a mismatch.

    Above it, each engine has a row: the mean, and the mode that Prop. 4.3 predicts, with their intervals.
    """
    if not shapes:
        say_nothing_to_show(ax, "The distributions are the same.")
        return
    ax.axvline(0, 0, 1 - ABOVE, color=GREY, linewidth=0.8)
    ax.set_xlabel("−Δ in units of ε_max")
    ax.set_ylabel("density")
    across, apart = ax.get_xaxis_transform(), list(dict.fromkeys(shape.engine for shape in shapes))
    for place, engine in enumerate(apart):
        colour, dash, _ = arm_styles(engines)[engine]
        own = [shape for shape in shapes if shape.engine == engine]
        edges = [own[0].eps_max_from, *(shape.eps_max_to for shape in own)]
        ax.stairs([shape.density for shape in own], edges, color=colour, linestyle=dash)
        # Most predictions lie near 0 and would overlap, so each engine has a row of its own.
        top, middle, bottom = (1 - ABOVE * (place + part) / len(apart) for part in (0.1, 0.5, 0.9))
        (row,) = (row for row in rows if row.engine == engine)
        mode, mean = row.paper_eps_max, row.signed_eps_max
        ax.plot([mode.mean, mode.mean], [bottom, top], color=colour, linewidth=0.8, transform=across)
        ax.fill_between([mode.low, mode.high], bottom, top, color=colour, alpha=0.3, linewidth=0, transform=across)
        ax.plot([mean.low, mean.high], [middle, middle], color=colour, linewidth=0.8, transform=across)
        ax.plot(mean.mean, middle, color=colour, marker="o", markersize=2.5, transform=across)
    keys = [Line2D([], [], color=GREY, linestyle="", marker=m, markersize=3) for m in ("|", "o")]
    ax.legend(keys, ["predicted mode", "mean"], loc="upper left", fontsize=7, borderaxespad=0, handletextpad=0)
    _set_density_axes(ax, shapes)


def _set_density_axes(ax: Axes, shapes: Sequence[HistogramBin]) -> None:
    """Limit the axes to bins that are not almost empty; the density is logarithmic and leaves the upper part free."""
    highest = max(shape.density for shape in shapes)
    seen = [shape for shape in shapes if shape.density > LEAST * highest]
    reach = max(max(-shape.eps_max_from, shape.eps_max_to) for shape in seen)
    ax.set_xlim(-reach, reach)
    high = math.ceil(math.log10(highest))
    low = min(high - 1, math.floor(math.log10(min(shape.density for shape in seen))))
    ax.set_yscale("log")
    ax.set_ylim(10.0**low, 10.0 ** (low + (high - low) / (1 - ABOVE)))
    ax.set_yticks([10.0**power for power in range(low, high + 1, math.ceil((high - low) / 4))])
    ax.yaxis.set_minor_locator(NullLocator())


def _page(
    compared: Sequence[Compared], verdicts: Sequence[Verdict], distances: Sequence[Distance],
    overlaps: Sequence[SetOverlap], signatures: Sequence[ProbabilityBin], flips: Sequence[LayerFlips],
) -> str:  # fmt: skip
    engines = [one.engine for one in distances]
    return render(
        "distributions/page.md.j2",
        settings=compared[0].settings,
        vocabulary=compared[0].record["vocabulary"],
        made_by=made_by([DistributionsRecord.model_validate(one.record) for one in compared]),
        verdicts=verdicts,
        distances=distances,
        signatures=signatures,
        mass={engine: sum(row.mass for row in signatures if row.engine == engine) for engine in engines},
        overlaps=overlaps,
        flips=flips,
        narrow=NARROW,
        cell=_cell,
        inf=math.inf,
    )


def _cell(interval: Interval) -> str:
    return short(interval.mean) if interval.low == interval.high else with_interval(interval, short)
