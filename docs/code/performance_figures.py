"""The figures of docs/performance.md, from the published files of the benchmarks and of the default study."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from performance import DOCS, rows, value
from tailrl.page_parts.drawing import ARM_COLOURS
from tailrl.reports.axes import BLACK, BLUE, GREY, ORANGE, RED, save_svg, style

FIGURES = DOCS / "figures"
WIDTH = 4.7
"""Inches: on a phone of 390 pixels a type of 9 points stays above 9 pixels."""

PHASES = ("rollout", "forward", "backward", "optimizer", "weights", "metrics", "reward", "other")
THRESHOLDS = {"no mask": "ours, no mask", **{f"e^{n}": f"ours, ρ = e^{n}" for n in (-16, -13, -8, -4)}}
PEERS = {"TRL, full logits": ORANGE, "Liger, chunked": GREY}


def draw_logprobs(figure: Figure) -> None:
    """Time against ρ at two lengths, and memory against the number of tokens."""
    time, memory = figure.subplots(2, 1)
    for tokens, colour, marker in ((2048, BLUE, "o"), (8192, RED, "s")):
        at = {"tokens": tokens, "vocabulary": 49152}
        ratios = [value("logprobs.csv", "ratio", case=case, **at) for case in THRESHOLDS.values()]
        time.plot(list(THRESHOLDS), ratios, marker, color=colour, linestyle="-", label=f"ours, {tokens:,} tokens")
    for peer, colour in PEERS.items():
        level = value("logprobs.csv", "ratio", case=peer, tokens=2048, vocabulary=49152)
        time.axhline(level, color=colour, linestyle="--", linewidth=1, label=f"{peer}, 2,048 tokens")
    time.axhline(1, color=BLACK, linewidth=0.8)
    time.set(ylabel="time over full logits", xlabel="threshold ρ of the safe set", ylim=(0, None))
    cases = {"full logits": BLACK, **PEERS, "ours, no mask": BLUE, "ours, ρ = e^-13": RED}
    for (case, colour), marker in zip(cases.items(), "oDvs^", strict=True):
        own = rows("logprobs.csv", case=case, vocabulary=49152)
        points = sorted((int(row["tokens"]), float(row["peak_mib"])) for row in own)
        memory.plot(*zip(*points, strict=True), marker, color=colour, linestyle="-", label=case)
    memory.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak memory, MiB")
    memory.set_xticks([1024, 2048, 4096, 8192], ["1,024", "2,048", "4,096", "8,192"])
    memory.set_yticks([100, 300, 1000, 3000, 10000], ["100", "300", "1,000", "3,000", "10,000"])
    memory.minorticks_off()
    for ax in (time, memory):
        _dress(ax)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)


def draw_phases(figure: Figure) -> None:
    """Seconds of a step of each arm of the default study, by phase."""
    table, study = "tables/time.csv", "default"
    arms = list(dict.fromkeys(row["arm"] for row in rows(table, study=study)))
    ax = figure.subplots()
    left = [0.0] * len(arms)
    for phase, colour in zip(PHASES, (*ARM_COLOURS, GREY), strict=True):
        widths = [value(table, "seconds", study=study, arm=arm, phase=phase) for arm in arms]
        ax.barh(range(len(arms)), widths, 0.7, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(arms)), arms)
    ax.set(xlabel="seconds a step, beside another job", ylim=(len(arms) - 0.5, -0.5))
    _dress(ax)
    figure.legend(loc="outside upper center", ncols=4, fontsize=9)


def _dress(ax: Axes) -> None:
    ax.tick_params(labelsize=9)
    ax.xaxis.label.set_fontsize(9)
    ax.yaxis.label.set_fontsize(9)


DRAWN: dict[str, tuple[Callable[[Figure], None], float]] = {
    "logprobs": (draw_logprobs, 6.4),
    "phases": (draw_phases, 3.4),
}
"""Each figure's height in inches."""


def draw(folder: Path) -> None:
    """All of them, as `performance-<name>.svg`."""
    for name, (drawing, height) in DRAWN.items():
        with style():
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            drawing(figure)
            save_svg(figure, folder / f"performance-{name}.svg")
