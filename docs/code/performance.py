"""docs/performance.md, from its template beside this file and the published files of the benchmarks."""

import csv
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results"
PAGE = DOCS / "performance.md"
HALF_HOUR = DOCS.parent / "tests/gpu/half_hour.yaml"


class MissingRowError(Exception):
    """A published file has not exactly one row of this kind."""


def rows(file: str, **wanted: str | int) -> list[dict[str, str]]:
    """The rows of a published file whose columns have these values; those of a study's table have `study`."""
    with (RESULTS / file).open(newline="", encoding="utf-8") as lines:
        found = csv.DictReader(lines)
        return [row for row in found if all(row[key] == str(value) for key, value in wanted.items())]


def one(file: str, **wanted: str | int) -> dict[str, str]:
    """The one row of a published file that has these values.

    Raises:
        MissingRowError: no row has them, or more than one.
    """
    found = rows(file, **wanted)
    if len(found) != 1:
        raise MissingRowError(f"{file}: {len(found)} rows have {wanted}")
    return found[0]


def value(file: str, column: str, **wanted: str | int) -> float:
    """One number of a published file; raises as `one`."""
    return float(one(file, **wanted)[column])


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Markdown, with numbers to the right."""
    rule = ["---", *("--:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, rule, *lines))


def ratio(row: Mapping[str, str], column: str) -> str:
    """A ratio's median over the rounds, and its range where it has one: `0.56 (0.53 to 0.60)`."""
    median, least, most = (f"{float(row[f'{column}{end}']):.2f}" for end in ("", "_min", "_max"))
    return median if least == most else f"{median} ({least} to {most})"


def logprobs() -> str:
    """Time and memory of the constrained log-probs beside the peers'."""

    def lines() -> Iterator[list[object]]:
        for row in rows("logprobs.csv", tokens=8192, vocabulary=49152):
            at = [one("logprobs.csv", tokens=n, vocabulary=49152, case=row["case"]) for n in (2048, 8192)]
            yield [
                row["case"],
                *(cell for found in at for cell in (ratio(found, "ratio"), f"{int(found['peak_mib']):,}")),
            ]

    return table(("", "2,048 tokens: time", "MiB", "8,192 tokens: time", "MiB"), lines())


def memory() -> str:
    """Memory of ours over more tokens, minus the gradient, which is an output."""
    sizes = sorted({int(row["tokens"]) for row in rows("logprobs_memory.csv")})
    cases = dict.fromkeys(row["case"] for row in rows("logprobs_memory.csv"))
    find = partial(value, "logprobs_memory.csv", "rest_mib")
    lines = [[case, *(f"{find(case=case, tokens=size):.0f}" for size in sizes)] for case in cases]
    return table(("tokens", *(f"{size:,}" for size in sizes)), lines)


def update() -> str:
    """An update beside TRL's."""
    found = rows("update.csv")
    lines = [[row["case"], f"{float(row['cpu_seconds']):.2f}", ratio(row, "ratio_to_trl")] for row in found]
    return table(("", "CPU seconds", "over TRL"), lines)


def step() -> str:
    """A whole step beside TRL's."""

    def line(row: dict[str, str]) -> list[object]:
        whole, sampled = (f"{float(row[column]):.2f}" for column in ("cpu_seconds", "rollout_cpu_seconds"))
        return [row["case"], whole, ratio(row, "ratio_to_trl"), sampled]

    lines = map(line, rows("step.csv"))
    return table(("", "CPU seconds", "over TRL", "of it rollouts"), lines)


def rollout() -> str:
    """Tokens a second by policy and engine, and the exact engine's over each."""

    def line(row: dict[str, str]) -> list[object]:
        return [row["policy"], row["engine"], f"{int(row['tokens_per_second']):,}", ratio(row, "exact_over_this")]

    return table(("policy", "engine", "tokens a second", "exact over it"), map(line, rows("rollout.csv")))


def two_commits() -> str:
    """Ratios at an older commit beside today's; without what they are relative to, and without the matmuls."""
    left_out = ("TRL", "full logits", "exact float32", "matmuls alone")
    found = [row for row in rows("two_commits.csv") if row["case"] not in left_out]
    lines = ([row["benchmark"], row["case"], ratio(row, "before"), ratio(row, "now")] for row in found)
    return table(("benchmark", "case", "before", "now"), lines)


def study_time() -> str:
    """What the default study took on each machine, by kind of job."""
    parts = ("warm start", "training", "evaluation", "whole")

    def line(run: str) -> list[object]:
        seconds = {part: value("study_time.csv", "seconds", run=run, part=part) for part in parts}
        working = value("study_time.csv", "working_seconds", run=run, part="training") / seconds["training"]
        return [run, *(f"{seconds[part]:,.0f}" for part in parts), f"{100 * working:.0f} %"]

    runs = dict.fromkeys(row["run"] for row in rows("study_time.csv"))
    return table(
        ("", "warm start", "training jobs, added up", "evaluations, added up", "whole", "working"), map(line, runs)
    )


def profile() -> str:
    """Seconds of the exact engine by part and policy."""
    found = rows("rollout_profile.csv")
    policies, parts = (dict.fromkeys(row[column] for row in found) for column in ("policy", "part"))
    find = partial(value, "rollout_profile.csv", "seconds")
    lines = [[part, *(f"{find(policy=policy, part=part):.2f}" for policy in policies)] for part in parts]
    return table(("", *policies), lines)


def plan() -> str:
    """What `tailrl plan` said, and what was measured."""

    def line(row: dict[str, str]) -> list[object]:
        measured, planned = (
            float(row[f"rollout_{end}"]) + float(row[f"update_{end}"]) for end in ("cpu_seconds", "planned")
        )
        ratios = (float(row[f"{what}_ratio"]) for what in ("memory", "time"))
        of_memory, of_time = (f"{ratio:.2f}" for ratio in ratios)
        mib = (f"{int(row[name]):,}" for name in ("mib", "mib_planned"))
        return [row["policy"], *mib, of_memory, f"{measured:.2f}", f"{planned:.2f}", of_time]

    head = ("policy", "peak, MiB", "planned", "ratio", "step, CPU s", "planned", "ratio")
    return table(head, map(line, rows("plan.csv")))


def gpu_checks() -> str:
    """What was compared on a GPU; raises ValueError for a row that failed, which the page would not show."""

    def found(figure: str) -> str:
        phases = figure.find(": rollout")  # seconds are in the file
        return figure if phases < 0 else f"{figure[:phases]})"

    made = rows("gpu_check.csv")
    if failed := [row["check"] for row in made if row["verdict"] not in ("ok", "measured")]:
        raise ValueError(f"gpu_check.csv: not ok: {', '.join(failed)}")
    return table(
        ("check", "found", "at most", "GPU"),
        ([row["check"], found(row["figure"]), row["limit"], row["device"].split()[1]] for row in made),
    )


def gpu_rehearsal() -> dict[str, object]:
    """The first half hour on a GPU: how many of its rows two CPU cores executed, and the names of the others.

    Raises:
        ValueError: a row failed, or the file has other rows than the script.
    """
    made = rows("gpu_rehearsal.csv")
    planned = [row["name"] for row in yaml.safe_load(HALF_HOUR.read_text(encoding="utf-8"))]
    if [row["row"] for row in made] != planned:
        raise ValueError(f"gpu_rehearsal.csv: other rows than {HALF_HOUR.name} has; rehearse it again")
    if failed := [row["row"] for row in made if row["verdict"] not in ("done", "needs a GPU")]:
        raise ValueError(f"gpu_rehearsal.csv: not done: {', '.join(failed)}")
    left = [row["row"] for row in made if row["verdict"] != "done"]
    minutes = sum(float(row["seconds"]) for row in made) / 60
    return {"rows": len(made), "done": len(made) - len(left), "minutes": f"{minutes:.0f}", "left": "; ".join(left)}


def gpu_logprobs() -> str:
    """Time and memory of the constrained log-probs on a GPU."""
    lines = (
        [row["case"], f"{float(row['ms']):.0f}", ratio(row, "ratio"), f"{int(row['peak_mib']):,}"]
        for row in rows("logprobs_gpu.csv")
    )
    return table(("", "ms", "over three dense products", "MiB"), lines)


def gpu_small() -> dict[str, object]:
    """Steps of the exact engine on a GPU and their largest k3; those of bfloat16 and their mean."""
    arms: dict[str, list[float]] = {}
    for row in rows("gpu_small.csv"):
        arms.setdefault(row["arm"], []).append(float(row["rollout_corr/k3_kl"]))
    exact = [k3 for arm in ("twin", "floor_control") for k3 in arms[arm]]
    naive = arms["naive"]
    return {
        "steps": len(exact),
        "largest": f"{max(exact):g}",
        "naive": len(naive),
        "mean": f"{statistics.mean(naive):.1e}",
    }


def soak() -> dict[str, str]:
    """The ends of the long run, from the second tenth of the steps to the last."""
    second, *_, last = rows("soak.csv")[1:]
    times = [float(row["cpu_ms_a_step"]) for row in rows("soak.csv")]
    grown = float(last["resident_mib"]) / float(second["resident_mib"]) - 1
    warm = times[1:]
    slope = statistics.median((warm[b] - warm[a]) / (b - a) for a, b in combinations(range(len(warm)), 2))
    return {
        "steps": f"{int(last['steps'].split()[-1]) + 1:,}",
        "first": second["resident_mib"],
        "last": last["resident_mib"],
        "grown": f"{100 * grown:.2f}",
        "files": last["open_files"],
        "least": f"{min(times):.0f}",
        "most": f"{max(times):.0f}",
        "slower": f"{100 * slope * (len(warm) - 1) / statistics.median(warm):.1f}".replace("-", "−"),
    }


MADE: tuple[Callable[[], object], ...] = (
    *(logprobs, memory, update, step, rollout, two_commits, study_time, profile, plan, soak),
    *(gpu_checks, gpu_rehearsal, gpu_logprobs, gpu_small),
)


def page() -> str:
    """The page's Markdown."""
    template = Path(__file__).with_name("performance.md.j2").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    tables = {made.__name__: made() for made in MADE}
    others = one("rollout_profile.csv", policy="4 layers of 128", part="all other operators")["calls"]
    products = value("update.csv", "cpu_seconds", case="matmuls alone")
    sampling = value("step.csv", "rollout_cpu_seconds", case="ours, vLLM bfloat16, compiled")
    texts = {
        "others": f"{int(others):,}",
        "floor_ratio": lambda case, tokens: f"{value('logprobs_floor.csv', 'ratio', case=case, tokens=tokens):.2f}",
        "least": (products + sampling) / value("step.csv", "cpu_seconds", case="TRL"),
    }
    return environment.from_string(template).render(value=value, **texts, **tables)
