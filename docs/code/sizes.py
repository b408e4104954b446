"""The tables of docs/how-to/gpu.md, from `tailrl plan`'s code: what the shipped studies take, and what fits where.

`make pages` writes them into the page.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from blocks import filled
from tailrl.config.load import read_study
from tailrl.config.study import Study
from tailrl.planning.machine import Machine, machines
from tailrl.planning.plan import PROMPT, StudyPlan, evaluation_seconds, plan_job
from tailrl.planning.shapes import KNOWN, Shape
from tailrl.planning.work import work_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/gpu.md"
POLICIES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
MACHINES = tuple(machines()[name] for name in ("4090", "l40s", "h100", "h200"))
DEVICES = (1, 2, 4, 8, 16)
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)
BUDGET = 4096
"""Tokens of a micro-batch: the longest response of `studies/gpu.yaml` and its prompt."""


def studies() -> str:
    """What the shipped studies take."""

    def lines() -> Iterator[str]:
        for name, devices in (("night", 1), ("gpu", 1), ("gpu", 8), ("paper", 8)):
            study, machine = read_study(ROOT / f"studies/{name}.yaml"), MACHINES[2]
            plan = StudyPlan(study, machine, devices)
            training = plan.training_seconds / 3600
            evaluating = plan.policies * (evaluation_seconds(study, machine) or 0.0) / 3600
            host = plan.host_bytes / 1e9
            yield f"| `{name}` | {devices} × 80 GB | {host:,.0f} GB | {training:,.0f} h | {evaluating:,.0f} h |"

    head = ("| study | a run has | host memory | training, one run after another | evaluation, on one |", "| --- " * 5)
    return "\n".join([head[0], f"{head[1]}|", *lines()])


def sizes() -> str:
    """The fewest devices for a policy, and the hours of a run on them."""
    study = read_study(ROOT / "studies/gpu.yaml")
    head = ["policy", *(f"{machine.memory / 1e9:g} GB ({machine.name})" for machine in MACHINES)]
    lines = [[name.split("/")[1], *(_cell(study, KNOWN[name], machine) for machine in MACHINES)] for name in POLICIES]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def _cell(study: Study, shape: Shape, machine: Machine) -> str:
    arm = study.run(max(study.arms, key=lambda arm: study.arms[arm].vocabulary.prunes))
    training = arm.training.model_copy(update={"token_budget": BUDGET})
    for devices in DEVICES:
        fitting = []
        for shared, share in product((n for n in DEVICES if n <= devices), SHARES):
            sampler = arm.sampler.model_copy(update={"tensor_parallel": shared, "gpu_memory_utilization": share})
            run = arm.model_copy(update={"training": training, "sampler": sampler})
            job = plan_job(shape, run, work_of(training, PROMPT, None, devices), machine, devices)
            if not job.lacking:
                fitting.append(job.step)
        if fitting:
            return f"{devices}: {min(fitting) * training.steps / 3600:.0f} h"
    return f"more than {DEVICES[-1]}"


def page() -> str:
    """The page with its tables as they are now."""
    return filled(PAGE, {"the studies' plans": studies(), "plans of larger policies": sizes()})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
