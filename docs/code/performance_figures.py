"""The figures of docs/performance.md, from the published files of the benchmarks and of the default study."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from performance import DOCS, rows, value
from tailrl.page_parts.drawing import ARM_COLOURS
from tailrl.reports.axes import BLACK, BLUE, GREY, ORANGE, RED, save_svg, set_percent_axis, style

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


def draw_step(figure: Figure) -> None:
    """CPU seconds of a step, split into rollouts and the rest."""
    found = {row["case"]: row for row in rows("step.csv")}
    sampled = [float(row["rollout_cpu_seconds"]) for row in found.values()]
    rest = [float(row["cpu_seconds"]) - own for row, own in zip(found.values(), sampled, strict=True)]
    ax = figure.subplots()
    _stack(ax, list(found), {"rollouts": sampled, "the rest of the step": rest}, "CPU seconds a step")


def draw_engines(figure: Figure) -> None:
    """Tokens a second over vLLM's, by engine and policy."""
    ax = figure.subplots()
    found = rows("rollout.csv")
    engines = list(dict.fromkeys(row["engine"] for row in found))
    for policy, colour, marker in zip(dict.fromkeys(row["policy"] for row in found), ARM_COLOURS, "osD^", strict=False):
        speeds = [value("rollout.csv", "tokens_per_second", policy=policy, engine=engine) for engine in engines]
        base = value("rollout.csv", "tokens_per_second", policy=policy, engine="vLLM bfloat16")
        ax.plot([speed / base for speed in speeds], range(len(engines)), marker, color=colour, label=policy)
    ax.axvline(1, color=BLACK, linewidth=0.8)
    ax.set_yticks(range(len(engines)), engines)
    ax.set(xlabel="tokens a second over vLLM's", xlim=(0, None), ylim=(len(engines) - 0.5, -0.5))
    _dress(ax)
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def draw_phases(figure: Figure) -> None:
    """Seconds of a step of each arm of the default study, by phase."""
    table, study = "tables/time.csv", "default"
    arms = list(dict.fromkeys(row["arm"] for row in rows(table, study=study)))
    seconds = {phase: [value(table, "seconds", study=study, arm=arm, phase=phase) for arm in arms] for phase in PHASES}
    _stack(figure.subplots(), arms, seconds, "seconds a step, beside another job")


def draw_plan(figure: Figure) -> None:
    """What `tailrl plan` said over what was measured."""
    ax = figure.subplots()
    found = rows("plan.csv")
    for what, colour, marker in (("memory", BLUE, "o"), ("time", RED, "s")):
        ax.plot([float(row[f"{what}_ratio"]) for row in found], range(len(found)), marker, color=colour, label=what)
    ax.axvline(1, color=BLACK, linewidth=0.8)
    ax.set_yticks(range(len(found)), [row["policy"] for row in found])
    ax.set(xlabel="planned over measured", xlim=(0.7, 1.3), ylim=(len(found) - 0.5, -0.5))
    set_percent_axis(ax)
    _dress(ax)
    figure.legend(loc="outside upper center", ncols=2, fontsize=9)


def _stack(ax: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str) -> None:
    left = [0.0] * len(names)
    for (part, widths), colour in zip(parts.items(), (*ARM_COLOURS, GREY), strict=False):
        ax.barh(range(len(names)), widths, 0.7, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=label, ylim=(len(names) - 0.5, -0.5))
    _dress(ax)
    figure = ax.figure
    assert isinstance(figure, Figure)
    figure.legend(loc="outside upper center", ncols=min(4, len(parts)), fontsize=9)


def _dress(ax: Axes) -> None:
    ax.tick_params(labelsize=9)
    ax.xaxis.label.set_fontsize(9)
    ax.yaxis.label.set_fontsize(9)


DRAWN: dict[str, tuple[Callable[[Figure], None], float]] = {
    "logprobs": (draw_logprobs, 6.4),
    "step": (draw_step, 2.4),
    "engines": (draw_engines, 2.2),
    "phases": (draw_phases, 3.4),
    "plan": (draw_plan, 3.0),
}
"""Each figure's height in inches."""


def draw(folder: Path) -> None:
    """All of them, as `performance-<name>.svg`."""
    for name, (drawing, height) in DRAWN.items():
        with style():
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            drawing(figure)
            save_svg(figure, folder / f"performance-{name}.svg")
