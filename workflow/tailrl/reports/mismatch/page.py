"""The report's figures. Each draws only the table that is written beside it as CSV.

Curves are means over seeds with a band from the smallest to the largest seed. Figures are drawn inside
`axes.style()`, on text width, without pyplot's global state.
"""

from collections.abc import Sequence
from math import inf, isfinite, isnan

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tailrl.analysis.scores import Gain, PolicyScore
from tailrl.analysis.tables import Curve, DeltaBin, TimeShare, lacking
from tailrl.config.study import BASE_ARM
from tailrl.report.axes import (
    DASHES,
    GREY,
    WIDTH,
    Dash,
    Look,
    arm_legend,
    arm_styles,
    make_panels,
    say_in_the_middle,
    say_nothing_to_show,
    set_magnitude_scale,
    set_marks,
    set_percent_axis,
    style,
)
from tailrl.stats.intervals import Interval
from tailrl.tracking import metrics as keys

TRAINING = {
    keys.REWARD: "reward",
    keys.ENTROPY: "policy entropy (nats)",
    keys.GRADIENT_NORM: "gradient norm",
    keys.LENGTH: "response length (tokens)",
}
"""The panels of the training figure: metric and its title."""

MISMATCH = {
    keys.K3_MASKED: "k3 KL, masked (nats)",
    keys.K3_UNMASKED: "k3 KL, unmasked (nats)",
    keys.WEIGHT_RAW: "mean weight before clipping",
    keys.SAMPLE_SIZE_RAW: "effective sample size (of batch)",
    keys.OUTSIDE: "tokens outside the trainer's set",
    keys.REJECTED: "rejected (dots: vetoed)",
}
"""The panels of the mismatch figure; vetoed sequences are dots in the panel of rejected ones."""

MAGNITUDES = (keys.GRADIENT_NORM, keys.K3_MASKED, keys.K3_UNMASKED, keys.WEIGHT_RAW)
"""Metrics that span decades: log axes."""

KEPT = {
    (keys.KEPT_MASS_TRAIN, keys.KEPT_MASS_ROLLOUT): "mass outside the set, mean 1 − Z",
    (keys.KEPT_MASS_TRAIN_MIN, keys.KEPT_MASS_ROLLOUT_MIN): "largest 1 − Z at a position",
    (keys.KEPT_VOCAB_TRAIN, keys.KEPT_VOCAB_ROLLOUT): "size of the set (tokens)",
}
"""The panels of the kept-mass figure: a metric in the trainer (line) and in the sampler (dots). A mass
is shown as 1 minus it."""

PHASE_COLOURS = {
    "rollout": "#332288",
    "reward": "#AA4499",
    "forward": "#88CCEE",
    "backward": "#44AA99",
    "optimizer": "#117733",
    "weights": "#DDCC77",
    "metrics": "#CC6677",
    "other": "#DDDDDD",
}
"""Paul Tol's muted colours, which differ from the arms' colours."""

FEWEST_TOKENS = 10
"""The mean of a probability bin with fewer tokens is not drawn."""


def is_mass(key: keys.Metric) -> bool:
    """Whether a metric of KEPT is a mass, which is shown as 1 minus it."""
    return key.unit == "fraction"


def training_figure(curves: Sequence[Curve], arms: Sequence[str]) -> Figure:
    """Reward, entropy, gradient norm and response length over the steps."""
    with style():
        figure, panels = make_panels(2, 2, 4.2)
        for ax, (metric, label) in zip(panels, TRAINING.items(), strict=True):
            own = [c for c in curves if c.metric == metric]
            draw_curves(ax, own, arms)
            if metric in MAGNITUDES:
                set_magnitude_scale(ax, _values(own))
            ax.set_title(label)
        window = max(curve.window for curve in curves)
        smoothed = f" (moving mean of {window} steps)" if window > 1 else ""
        for ax in panels[2:]:
            ax.set_xlabel(f"training step{smoothed}")
        arm_legend(figure, arms)
    return figure


def mismatch_figure(curves: Sequence[Curve], arms: Sequence[str]) -> Figure:
    """k3 KL masked and unmasked, sequence weights before clipping, tokens outside, sequences discarded."""
    with style():
        figure, panels = make_panels(2, 3, 3.9)
        for ax, (metric, label) in zip(panels, MISMATCH.items(), strict=True):
            own = [c for c in curves if c.metric == metric]
            draw_curves(ax, own, arms)
            vetoed = [c for c in curves if c.metric == keys.VETOED] if metric == keys.REJECTED else []
            draw_curves(ax, vetoed, arms, dash=":")
            if metric in MAGNITUDES:
                set_magnitude_scale(ax, _values(own))
            elif any(isfinite(value) for value in _values(own)):
                set_percent_axis(ax, axis="y")
                if not any(value > 0 for value in _values([*own, *vetoed])):
                    ax.set_ylim(-0.05, 1)  # the default range of zeros alone is half negative
                    say_in_the_middle(ax, "0 in every arm")
            ax.set_title(label)
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
            set_magnitude_scale(ax, _values(own))
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
                _draw_intervals(ax, x, intervals, look)
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


def _dress_scores(ax: Axes, name: str, arms: int) -> None:
    low, high = ax.get_xlim()
    ax.set_xlim(max(low, -0.02), min(high, 1.02))  # a t interval of few seeds can leave [0, 1]
    ax.set_ylim(arms - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    set_percent_axis(ax)
    ax.set_xlabel(f"{name} on held-out problems")


def time_figure(shares: Sequence[TimeShare], arms: Sequence[str]) -> Figure:
    """Each phase's share of a step's time, with the seconds of a whole step at the end."""
    with style():
        figure, (ax,) = make_panels(1, 1, 1.0 + 0.3 * len(arms))
        if all(isnan(share.share) for share in shares):
            say_nothing_to_show(ax, "No run recorded the time of its steps.")
            return figure
        start = dict.fromkeys(arms, 0.0)
        for phase, colour in PHASE_COLOURS.items():
            for share in (s for s in shares if s.phase == phase and not isnan(s.share)):
                place = arms.index(share.arm)
                ax.barh(place, share.share, 0.7, left=start[share.arm], color=colour)
                if share.share >= 0.06:
                    ink = "black" if phase in ("forward", "weights", "other") else "white"
                    middle = start[share.arm] + share.share / 2
                    ax.text(middle, place, f"{share.share:.0%}", ha="center", va="center", color=ink, fontsize=7)
                start[share.arm] += share.share
        for place, arm in enumerate(arms):
            seconds = sum(s.seconds for s in shares if s.arm == arm)
            ax.text(1.01, place, "not timed" if isnan(seconds) else f"{seconds:.3g} s", va="center", fontsize=7)
        ax.set_yticks(range(len(arms)), arms)
        ax.set_ylim(len(arms) - 0.5, -0.5)
        ax.set_xlim(0, 1)
        ax.grid(visible=False)
        set_percent_axis(ax)
        ax.set_xlabel("share of a training step (right: seconds per step)")
        patches = [Patch(color=colour) for colour in PHASE_COLOURS.values()]
        figure.legend(
            patches, list(PHASE_COLOURS), loc="outside upper center", ncols=8, handlelength=1, columnspacing=1.2
        )
    return figure


def _values(curves: Sequence[Curve]) -> list[float]:
    return [float(value) for curve in curves for band in (curve.low_N, curve.high_N) for value in band]


def draw_curves(ax: Axes, curves: Sequence[Curve], arms: Sequence[str], *, dash: Dash | None = None) -> None:
    """Draw mean lines and seed bands, or a note if no run has the metric. `dash` replaces the arms' own dashes and
    markers."""
    if dash is None and all(isnan(value) for value in _values(curves)):
        say_in_the_middle(ax)
        ax.set(xticks=[], yticks=[])
        return
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    styles = arm_styles(arms)
    for curve in curves:
        colour, own_dash, marker = styles[curve.arm]
        (line,) = ax.plot(curve.step_N, curve.mean_N, color=colour, linestyle=dash or own_dash)
        # A single step is a point: a line through it would be invisible.
        if dash is None or curve.step_N.size == 1:
            set_marks(line, marker, list(styles).index(curve.arm), len(styles))
        ax.fill_between(curve.step_N, curve.low_N, curve.high_N, color=colour, alpha=0.15, linewidth=0)


def _draw_intervals(ax: Axes, x: Sequence[float], intervals: Sequence[Interval], look: Look) -> None:
    drawn = ax.plot(x, [i.mean for i in intervals], color=look.colour, linestyle=look.dash, linewidth=0.8)
    drawn[0].set(marker=look.marker, markersize=3)
    ax.vlines(x, [i.low for i in intervals], [i.high for i in intervals], color=look.colour, linewidth=1)
