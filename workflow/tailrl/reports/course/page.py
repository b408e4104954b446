"""How training went: reward, entropy, gradient norm and length over the steps, and where the time went."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.reports.axes import arm_legend, make_panels, save_svg_and_pdf, say_nothing_to_show, set_percent_axis, style
from tailrl.reports.course.numbers import TimeShare, course, flip_rows, response_means, reward_rows, time_shares
from tailrl.reports.course.snapshots import has_snapshots, write_snapshots
from tailrl.reports.curves import Curve, curves_of, draw_metric, window_of
from tailrl.tracking import metrics as keys

TRAINING = {
    keys.REWARD: "reward",
    keys.ENTROPY: "policy entropy (nats)",
    keys.GRADIENT_NORM: "gradient norm",
    keys.LENGTH: "response length (tokens)",
}
"""The panels of the training figure: metric and its title."""

DARK_INK, LIGHT_INK = "#1D2328", "#FEFEFE"  # on the phases' colours; the same on a light and on a dark page

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


def write_course(results: Results, out: Path) -> list[Curve]:
    """Write the figures and tables of the course of training; returns the curves of the training figure."""
    curves = curves_of(results, TRAINING, window=window_of(results.all_runs()))
    write_csv(out / "tables" / "training.csv", (row for curve in curves for row in curve.rows()))
    save_svg_and_pdf(training_figure(curves, results.arms), out / "figures" / "training.svg")
    shares = [row for arm in results.arms for row in time_shares(results.runs[arm])]
    write_csv(out / "tables" / "time.csv", flat_rows(shares))
    save_svg_and_pdf(time_figure(shares, results.arms), out / "figures" / "time.svg")
    write_csv(out / "tables" / "flips.csv", flip_rows(results))
    write_csv(out / "tables" / "responses.csv", flat_rows(response_means(results)))
    write_csv(out / "tables" / "course.csv", flat_rows(course(results)))
    write_csv(out / "tables" / "rewards.csv.gz", reward_rows(results))
    if has_snapshots(results):
        write_snapshots(results, out)
    return curves


def training_figure(curves: Sequence[Curve], arms: Sequence[str]) -> Figure:
    """Reward, entropy, gradient norm and response length over the steps."""
    with style():
        figure, panels = make_panels(2, 2, 4.2)
        for ax, (metric, label) in zip(panels, TRAINING.items(), strict=True):
            draw_metric(ax, curves, metric, label, arms)
        window = max(curve.window for curve in curves)
        smoothed = f" (moving mean of {window} steps)" if window > 1 else ""
        for ax in panels[2:]:
            ax.set_xlabel(f"training step{smoothed}")
        arm_legend(figure, arms)
    return figure


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
                    ink = DARK_INK if phase in ("forward", "weights", "other") else LIGHT_INK
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
