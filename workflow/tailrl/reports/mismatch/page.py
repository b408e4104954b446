"""The mismatch over the steps, the mass outside the safe set, and Δ of sampled tokens: tables and figures."""

from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.reports.axes import (
    DASHES,
    GREY,
    WIDTH,
    Dash,
    arm_legend,
    arm_styles,
    draw_intervals,
    make_panels,
    save_svg_and_pdf,
    say_in_the_middle,
    say_nothing_to_show,
    set_magnitude_scale,
    set_percent_axis,
    style,
)
from tailrl.reports.curves import MAGNITUDES, Curve, curve, curves_of, draw_curves, draw_metric, ends_of, lacking
from tailrl.reports.mismatch.numbers import DeltaBin, delta_bins, first_k3, k3_ratios
from tailrl.stats.intervals import Interval
from tailrl.tracking import metrics as keys

MISMATCH = {
    keys.K3_MASKED: "k3 KL, masked (nats)",
    keys.K3_UNMASKED: "k3 KL, unmasked (nats)",
    keys.WEIGHT_RAW: "mean weight before clipping",
    keys.SAMPLE_SIZE_RAW: "effective sample size (of batch)",
    keys.OUTSIDE: "tokens outside the trainer's set",
    keys.REJECTED: "rejected (dots: vetoed)",
}
"""The panels of the mismatch figure; vetoed sequences are dots in the panel of rejected ones."""

KEPT = {
    (keys.KEPT_MASS_TRAIN, keys.KEPT_MASS_ROLLOUT): "mass outside the set, mean 1 − Z",
    (keys.KEPT_MASS_TRAIN_MIN, keys.KEPT_MASS_ROLLOUT_MIN): "largest 1 − Z at a position",
    (keys.KEPT_VOCAB_TRAIN, keys.KEPT_VOCAB_ROLLOUT): "size of the set (tokens)",
}
"""The panels of the kept-mass figure: a metric in the trainer (line) and in the sampler (dots). A mass
is shown as 1 minus it."""

FEWEST_TOKENS = 10
"""The mean of a probability bin with fewer tokens is not drawn."""


def write_mismatch(results: Results, out: Path) -> list[Curve]:
    """Write the figures and tables of the mismatch; returns the curves of the mismatch figure."""
    curves = curves_of(results, (*MISMATCH, keys.VETOED))
    pruned = [arm for arm in results.arms if results.settings(arm).vocabulary.prunes]
    kept = [curve(results.runs[arm], key, lost=is_mass(key)) for pair in KEPT for key in pair for arm in pruned]
    for name, drawn, draw in (("mismatch", curves, mismatch_figure), ("kept", kept, kept_figure)):
        write_csv(out / "tables" / f"{name}.csv", (row for one in drawn for row in one.rows()))
        save_svg_and_pdf(draw(drawn, results.arms), out / "figures" / f"{name}.svg")
    bins = [row for arm in results.arms for row in delta_bins(results.runs[arm])]
    write_csv(out / "tables" / "delta.csv", flat_rows(bins))
    save_svg_and_pdf(delta_figure(bins, results.arms), out / "figures" / "delta.svg")
    first = first_k3(results)
    write_csv(out / "tables" / "first_k3.csv", flat_rows(first))
    write_csv(out / "tables" / "k3_ratios.csv", flat_rows(k3_ratios(first)))
    return curves


def is_mass(key: str) -> bool:
    """Whether a metric of KEPT is a mass, which is shown as 1 minus it."""
    return keys.METRICS[key].unit == "fraction"


def mismatch_figure(curves: Sequence[Curve], arms: Sequence[str]) -> Figure:
    """k3 KL masked and unmasked, sequence weights before clipping, tokens outside, sequences discarded."""
    with style():
        figure, panels = make_panels(2, 3, 3.9)
        for ax, (metric, label) in zip(panels, MISMATCH.items(), strict=True):
            own = draw_metric(ax, curves, metric, label, arms)
            vetoed = [c for c in curves if c.metric == keys.VETOED] if metric == keys.REJECTED else []
            draw_curves(ax, vetoed, arms, dash=":")
            if metric not in MAGNITUDES and any(isfinite(value) for value in ends_of(own)):
                set_percent_axis(ax, axis="y")
                if not any(value > 0 for value in ends_of([*own, *vetoed])):
                    ax.set_ylim(-0.05, 1)  # the default range of zeros alone is half negative
                    say_in_the_middle(ax, "0 in every arm")
        for ax in panels[3:]:
            ax.set_xlabel("training step")
        arm_legend(figure, arms)
    return figure


def kept_figure(curves: Sequence[Curve], arms: Sequence[str]) -> Figure:
    """Mass outside the safe set and size of the set over the steps, in the trainer and in the sampler."""
    with style():
        if not curves:
            figure, panels = make_panels(1, 1, 1.2)
            say_nothing_to_show(panels[0], "No arm of this study prunes the vocabulary.")
            return figure
        figure, panels = make_panels(1, 3, 2.3)
        for ax, (pair, label) in zip(panels, KEPT.items(), strict=True):
            own = []
            dashes: tuple[Dash | None, ...] = (None, ":")
            for key, dash in zip(pair, dashes, strict=True):
                drawn = [c for c in curves if c.metric == (lacking(key) if is_mass(key) else key)]
                draw_curves(ax, drawn, arms, dash=dash)
                own += drawn
            set_magnitude_scale(ax, ends_of(own))
            if is_mass(pair[0]) and ax.get_yscale() == "linear":
                set_percent_axis(ax, axis="y")
            ax.set_title(label)
            ax.set_xlabel("training step")
        lines = [Line2D([], [], color=GREY, linestyle=dash) for dash in DASHES[::3]]
        panels[2].legend(lines, ["trainer", "sampler"], loc="best", fontsize=7)
        arm_legend(figure, arms, [curve.arm for curve in curves])
    return figure


def delta_figure(bins: Sequence[DeltaBin], arms: Sequence[str]) -> Figure:
    """|Δ| and -Δ of sampled tokens by the trainer's probability, and the number of tokens in each bin."""
    with style():
        figure = Figure(figsize=(WIDTH * 0.75, 5.0), layout="constrained")
        size, signed, count = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.6))
        edges = sorted({b.nats_from for b in bins} | {b.nats_to for b in bins})
        drawn: list[float] = []
        for index, (arm, look) in enumerate(arm_styles(arms).items()):
            own = [b for b in bins if b.arm == arm]
            # Arms stand side by side within a bin, so that their intervals do not overlap.
            place = [edges.index(b.nats_from) + (index + 1) / (len(arms) + 1) for b in own]
            shown = [(x, b) for x, b in zip(place, own, strict=True) if b.tokens >= FEWEST_TOKENS]
            x = [x for x, _ in shown]
            for ax, field in ((size, "size"), (signed, "signed")):
                ends = [(getattr(b, field), getattr(b, f"{field}_low"), getattr(b, f"{field}_high")) for _, b in shown]
                intervals = [Interval(*end, b.clusters) for end, (_, b) in zip(ends, shown, strict=True)]
                draw_intervals(ax, x, intervals, look)
            drawn += [b.size for _, b in shown]
            count.plot(place, [b.tokens for b in own], marker=".", markersize=3, color=look.colour, linestyle=look.dash)
        _dress_delta(size, signed, count, edges, drawn)
        set_magnitude_scale(count, [b.tokens for b in bins])
        arm_legend(figure, arms)
    return figure


def _dress_delta(size: Axes, signed: Axes, count: Axes, edges: Sequence[float], sizes: Sequence[float]) -> None:
    set_magnitude_scale(size, sizes)
    size.set_ylabel("mean |Δ| (nats)")
    signed.axhline(0, color=GREY, linewidth=0.8)
    signed.set_ylabel("mean −Δ (nats)")
    count.set_ylabel("tokens")
    labels = ["∞" if edge == inf else f"{edge:g}" for edge in edges]
    count.set_xticks(range(len(edges)), labels)
    count.set_xlim(0, len(edges) - 1)
    count.set_xlabel("−ln π_train of the sampled token (nats; bin edges): likely ← → unlikely")
