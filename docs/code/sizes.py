"""The tables of docs/how-to/gpu.md, from `tailrl plan`'s code: what the shipped studies take, and what fits where.

`make pages` writes them into the page.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from blocks import filled
from tailrl.config.load import parse_study, read_study
from tailrl.config.study import Study
from tailrl.planning.machine import Machine, machines
from tailrl.planning.plan import StudyPlan, evaluation_seconds, host_bytes, plan_job
from tailrl.planning.shapes import KNOWN, Shape

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/gpu.md"
POLICIES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
MACHINES = tuple(machines()[name] for name in ("4090", "l40s", "h100", "h200"))
DEVICES = (1, 2, 4, 8, 16)
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)
BUDGET = 4096
"""Tokens of a micro-batch: the longest response of `studies/gpu.yaml` and its prompt."""
STEP = {
    "name": "floors",
    "policy": {"source": "pretrained", "path": POLICIES[0]},
    "arms": {
        "dvp_mis": {"vocabulary": {"rule": "min_p", "rho": "e-13"}, "correction": {"sequence": "mis", "veto": 1e-4}}
    },
    "training": {
        **{"prompts": 8, "group_size": 64, "max_new_tokens": 512, "token_budget": 16_384},
        **{"dtype": "bfloat16", "activation_checkpointing": True},
    },
}
"""The step whose floors are shown: 512 responses of 512 tokens to 8 prompts."""


def studies() -> str:
    """What the shipped studies take."""

    def lines() -> Iterator[str]:
        for name, devices in (("night", 1), ("gpu", 1), ("gpu", 8), ("paper", 8)):
            study, machine = read_study(ROOT / f"studies/{name}.yaml"), MACHINES[2]
            plan = StudyPlan(study, machine, devices)
            training = plan.training_seconds / 3600
            evaluating = plan.policies * (evaluation_seconds(study, machine) or 0.0) / 3600
            host = host_bytes(plan.shape, study.training, devices) / 1e9
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
            job = plan_job(shape, run, machine, devices)
            if not job.placed.lacking:
                fitting.append(job.step)
        if fitting:
            return f"{devices}: {min(fitting) * training.steps / 3600:.0f} h"
    return f"more than {DEVICES[-1]}"


def floors() -> str:
    """A step of STEP on an H100, by phase: what it computes and moves at least, and what the plan expects."""
    machine = machines()["h100"]
    lines = ["| policy | phase | 10^12 operations | GB moved | floor, s | planned, s |", "| --- " * 6 + "|"]
    for name in POLICIES[:2]:
        job = plan_job(KNOWN[name], parse_study(STEP).run("dvp_mis"), machine, 1)
        for phase, floor in job.floors.items():
            counted = f"{floor.operations / 1e12:,.0f} | {floor.moved / 1e9:,.0f} | {floor.seconds(machine):.2f}"
            lines.append(f"| {name.split('/')[1]} | {phase} | {counted} | {job.seconds[phase]:.2f} |")
        least = sum(floor.seconds(machine) for floor in job.floors.values())
        lines.append(f"| {name.split('/')[1]} | a step | | | {least:.2f} | {job.step:.2f} |")
    return "\n".join(lines)


def page() -> str:
    """The page with its tables as they are now."""
    tables = {"the studies' plans": studies(), "plans of larger policies": sizes(), "floors of a step": floors()}
    return filled(PAGE, tables)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
