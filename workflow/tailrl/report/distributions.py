"""Engines' whole distributions against the trainer's: the tables as CSV, a page of them, and the figure."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from tailrl.report.axes import (
    GREY,
    arm_legend,
    arm_styles,
    make_panels,
    save_svg,
    say_nothing_to_show,
    set_magnitude_scale,
    style,
)
from tailrl.report.distribution_tables import (
    Compared,
    Distance,
    ProbabilityBin,
    SetOverlap,
    distance,
    probability_bins,
    read_compared,
    set_overlaps,
    signature,
)
from tailrl.report.statistics import Interval
from tailrl.report.summary import count, short, table
from tailrl.report.tables import flat_rows, write_csv

MARKERS = ("o", "D", "s", "^", "v", "P", "X", "<", ">", "*")
"""Of the thresholds, in the panel of the safe sets."""


def write_distributions(results: Path, engines: Sequence[str], out: Path) -> list[Compared]:
    """Writes out/distributions.csv, safe_sets.csv, probability.csv, distributions.md and distributions.svg; returns
    what was compared.

    Args:
        results: what the jobs left: a folder for each engine with positions.npz and run.json.
        engines: which of them, in the order in which they are shown.
        out: where the report goes; the same inputs give the same bytes.

    Raises:
        StudyError: one of these files is missing or cannot be used.
    """
    compared = [read_compared(results / engine, engine) for engine in engines]
    distances = [distance(one) for one in compared]
    overlaps = [row for one in compared for row in set_overlaps(one)]
    bins = [row for one in compared for row in probability_bins(one)]
    write_csv(out / "distributions.csv", flat_rows(distances))
    write_csv(out / "safe_sets.csv", flat_rows(overlaps))
    write_csv(out / "probability.csv", flat_rows(bins))
    save_svg(distribution_figure(compared, bins), out / "distributions.svg")
    signatures = [row for one in compared for row in signature(one)]
    (out / "distributions.md").write_text(_page(compared, distances, overlaps, signatures), encoding="utf-8")
    return compared


# --- figure -------------------------------------------------------------------------------------------


def distribution_figure(compared: Sequence[Compared], bins: Sequence[ProbabilityBin]) -> Figure:
    """Six panels: total variation and overlap by engine; size and sign of Δ by probability; Δ in head and tail."""
    engines = [one.engine for one in compared]
    with style():
        figure, (tv, overlap, size, balance, head, tail) = make_panels(3, 2, 6.6)
        _draw_rows(tv, [[one.arrays["tv_P"]] for one in compared], engines)
        tv.set_xlabel("total variation at a place")
        rhos = compared[0].record["settings"]["rho"]
        _draw_rows(overlap, [_missing(one) for one in compared], engines)
        overlap.set_xlabel("1 − |V_S ∩ V'_S| / |V_S| at a place")
        marks = [Line2D([], [], color=GREY, linestyle="", marker=m) for m, _ in zip(MARKERS, rhos, strict=False)]
        overlap.legend(marks, [f"ρ = {rho}" for rho in rhos], loc="best", fontsize=7)
        _draw_bins(size, balance, bins, engines)
        record = compared[0].record
        _draw_histogram(head, compared, "head_PH", f"head: −ln π_train < {record['head_below']:g}")
        _draw_histogram(tail, compared, "tail_PH", f"tail: −ln π_train ≥ {record['tail_from']:g}")
        arm_legend(figure, engines)
    return figure


def _missing(one: Compared) -> list[NDArray[np.float64]]:
    """What the overlap lacks of 1 at every place, for each threshold."""
    train_PS, both_PS = one.arrays["kept_train_PS"], one.arrays["kept_both_PS"]
    return list((1 - both_PS / train_PS).T)


def _draw_rows(ax: Axes, values: Sequence[Sequence[NDArray[np.float64]]], engines: Sequence[str]) -> None:
    """A row for each engine: the mean as a mark, 1st to 99th percentile as a line; on a log axis, so zeros in words."""
    ends = [float(np.quantile(own, 0.01)) or float(own.mean()) for row in values for own in row if own.any()]
    ax.set_yticks(range(len(engines)), engines)
    ax.set_ylim(len(engines) - 0.5, -0.5)
    if ends:
        ax.set_xscale("log")
        lowest = 10.0 ** math.floor(math.log10(min(ends)))
        ax.set_xlim(lowest, 1)
    for place, (row, (colour, _)) in enumerate(zip(values, arm_styles(engines).values(), strict=True)):
        if not any(own.any() for own in row):
            words = f"exactly 0 at all {len(row[0]):,} places"
            ax.text(0.03, place, words, transform=ax.get_yaxis_transform(), va="center", color=colour, fontsize=7)
            continue
        for index, (own, marker) in enumerate(zip(row, MARKERS, strict=False)):
            y = place + 0.28 * (index - (len(row) - 1) / 2)
            if not own.any():
                ax.text(0.03, y, "0", transform=ax.get_yaxis_transform(), va="center", color=colour, fontsize=7)
                continue
            low, high = np.quantile(own, (0.01, 0.99))
            ax.plot([max(low, lowest), max(high, lowest)], [y, y], color=colour, linewidth=1)
            ax.plot(own.mean(), y, color=colour, marker=marker, markersize=4)


def _draw_bins(size: Axes, balance: Axes, bins: Sequence[ProbabilityBin], engines: Sequence[str]) -> None:
    """Mean |Δ|, and mean −Δ over it, against −ln π_train; engines without any mismatch have neither."""
    edges = sorted({b.nats_from for b in bins})
    drawn: list[float] = []
    for index, (engine, (colour, dash)) in enumerate(arm_styles(engines).items()):
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


def _draw_histogram(ax: Axes, compared: Sequence[Compared], name: str, title: str) -> None:
    """How −Δ / ε_max is spread over the tokens that each engine samples; one without any mismatch has none."""
    ax.set_title(title)
    drawn = False
    for one, (colour, dash) in zip(compared, arm_styles([o.engine for o in compared]).values(), strict=True):
        mass_H = one.arrays[name].sum(axis=0)
        if mass_H.sum() > 0:
            width = 4 / len(mass_H)
            ax.stairs(mass_H / mass_H.sum() / width, np.linspace(-2, 2, len(mass_H) + 1), color=colour, linestyle=dash)
            drawn = True
    if not drawn:
        say_nothing_to_show(ax, "The distributions are the same.")
        return
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.set_yscale("log")
    ax.set_xlabel("−Δ in units of ε_max")
    ax.set_ylabel("density")


# --- words --------------------------------------------------------------------------------------------


def _page(
    compared: Sequence[Compared],
    distances: Sequence[Distance],
    overlaps: Sequence[SetOverlap],
    signatures: Sequence[ProbabilityBin],
) -> str:
    settings, vocabulary = compared[0].record["settings"], compared[0].record["vocabulary"]
    introduction = (
        f"At one place in {settings['every']} of {count(settings['responses'], 'response')} (at most "
        f"{settings['max_new_tokens']} tokens, temperature {settings['temperature']:g}, seed {settings['seed']}), "
        f"sampled from all {vocabulary:,} tokens by the engine in question, its whole distribution against that of the "
        f"trainer, which scores the responses in packed micro-batches of at most {settings['token_budget']} tokens. "
        "Both in float64 from float32 logits, in nats; Δ = ln π_train − ln π_infer. Means with 95 % intervals over "
        "problems, 99th percentiles over places; the interval of the flips is Wilson's over places."
    )
    return (
        "\n\n".join(
            [
                "# Whole distributions",
                introduction,
                _distance_table(distances),
                "## Signature of the mismatch",
                "Tokens by −ln π_train, each counted with the engine's probability of it, and the mode of −Δ that iid "
                "noise of a state's own variance over the vocabulary predicts: by arXiv 2512.23087, Prop. 4.3, and to "
                "second order, where mode and mean agree. `probability.csv` has the same in finer bins.",
                _signature_table(signatures),
                "## Safe sets",
                _overlap_table(overlaps),
            ]
        )
        + "\n"
    )


def _distance_table(distances: Sequence[Distance]) -> str:
    header = ("engine", "what it is", "places", "equal", "TV", "TV, 99 %", "KL(train, infer)", "KL(infer, train)")
    measures = ("sampled |Δ|", "|Δ|, 99 %", "largest |Δ|, mean", "argmax flips")
    rows = []
    for d in distances:
        sizes = [_cell(d.tv), short(d.tv_p99), _cell(d.kl_train_infer), _cell(d.kl_infer_train)]
        sizes += [_cell(d.delta), short(d.delta_p99), short(d.delta_max)]
        share = d.flip_share
        flips = f"{d.flips} ({100 * share.mean:.2g} %) [{100 * share.low:.2g}, {100 * share.high:.2g}]"
        rows.append([d.engine, d.what, str(d.places), str(d.equal), *sizes, flips])
    return table((*header, *measures), rows)


def _signature_table(signatures: Sequence[ProbabilityBin]) -> str:
    header = ("engine", "−ln π_train", "sampled", "mean |Δ|", "mean −Δ", "mode by Prop. 4.3", "to second order")
    places = {one.engine: sum(row.mass for row in signatures if row.engine == one.engine) for one in signatures}
    rows = []
    for row in signatures:
        words = f"from {row.nats_from:g}" if math.isinf(row.nats_to) else f"{row.nats_from:g} to {row.nats_to:g}"
        cells = [_cell(interval) for interval in (row.size, row.signed, row.paper, row.second)]
        rows.append([row.engine, words, f"{100 * row.mass / places[row.engine]:.3g} %", *cells])
    return table(header, rows)


def _overlap_table(overlaps: Sequence[SetOverlap]) -> str:
    header = ("engine", "ρ", "mean size, trainer", "engine's", "1 − Z", "sampled outside")
    agreement = ("overlap", "1st percentile", "least", "places that differ", "responses")
    rows = []
    for o in overlaps:
        sizes = [f"{o.kept_train:.4g}", f"{o.kept_infer:.4g}", short(o.lost_train), _cell(o.outside)]
        shares = [f"{o.overlap.mean:.6g}", f"{o.overlap_p01:.4g}", f"{o.overlap_least:.4g}"]
        rows.append([o.engine, o.rho, *sizes, *shares, f"{o.different} of {o.places}", str(o.responses_different)])
    return table((*header, *agreement), rows)


def _cell(interval: Interval) -> str:
    if math.isnan(interval.low) or interval.low == interval.high:
        return short(interval.mean)
    return f"{short(interval.mean)} [{short(interval.low)}, {short(interval.high)}]"
