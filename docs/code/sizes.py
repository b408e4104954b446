"""The tables of docs/how-to/gpu.md, from `tailrl plan`'s code: what the shipped studies take, and what fits where."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tailrl.config.load import read_study
from tailrl.config.study import Study
from tailrl.page_parts.number_text import count
from tailrl.planning.machine import Machine, machines
from tailrl.planning.plan import PROMPT, StudyPlan, evaluation_seconds, plan_job
from tailrl.planning.shapes import KNOWN, Shape
from tailrl.planning.work import work_of

ROOT = Path(__file__).parents[2]
POLICIES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
MACHINES = tuple(machines()[name] for name in ("4090", "l40s", "h100", "h200"))
DEVICES = (1, 2, 4, 8, 16)
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)
BUDGETS = (
    ("a card of 24 GB (RTX 4090), an afternoon", "afternoon", MACHINES[0], 1, "make afternoon"),
    ("an H100, a night", "night", MACHINES[2], 1, "make night"),
    ("an H100, two days", "gpu", MACHINES[2], 1, "make gpu"),
    ("eight H100, a night", "gpu", MACHINES[2], 8, "make gpu ARGS='--set-resources train:ranks=8'"),
    ("eight H100, more than a week", "paper", MACHINES[2], 8, "make figure1 GPUS=8 MEMORY=80GB"),
)
"""What one has, the study for it, one of its devices, how many share a run, and the command."""
TOKEN_BUDGET = 4096
"""Tokens of a micro-batch: the longest response of `studies/gpu.yaml` and its prompt."""


def studies() -> str:
    """What the shipped studies take, by budget."""

    def policy(study: Study) -> str:
        runs = count(sum(len(study.arm_seeds()[arm]) for arm in study.arms), "run")
        name = "from scratch" if study.policy.folder is None else study.policy.folder.rpartition("/")[2]
        return f"{name}: {runs} of {count(study.training.steps, 'step')}"

    def lines() -> Iterator[str]:
        default = policy(read_study(ROOT / "config.yaml"))
        minutes = "all of it 5 minutes, 11 without AVX-512"
        yield f"| a laptop, two CPU cores | `make reproduce` | {default} |  | {minutes} |  |"
        for budget, name, machine, devices, command in BUDGETS:
            study = read_study(ROOT / f"studies/{name}.yaml")
            plan = StudyPlan(study, machine, devices)
            host = plan.host_bytes / 1e9
            training = plan.training_seconds / 3600
            evaluating = plan.policies * (evaluation_seconds(study, machine) or 0.0) / 3600
            took = f"{host:,.0f} GB | {training:,.1f} h | {evaluating:,.1f} h"
            yield f"| {budget} | `{command}` | {policy(study)} | {took} |"

    titles = ("budget", "command", "policy", "host memory", "training, planned", "evaluation on one, planned")
    return "\n".join([f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", *lines()])


def sizes() -> str:
    """The fewest devices for a policy, and the hours of a run on them."""
    study = read_study(ROOT / "studies/gpu.yaml")
    head = ["policy", *(f"{machine.memory / 1e9:g} GB ({machine.name})" for machine in MACHINES)]
    lines = [[name.split("/")[1], *(_cell(study, KNOWN[name], machine) for machine in MACHINES)] for name in POLICIES]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def _cell(study: Study, shape: Shape, machine: Machine) -> str:
    arm = study.run(max(study.arms, key=lambda arm: study.arms[arm].vocabulary.prunes))
    training = arm.training.model_copy(update={"token_budget": TOKEN_BUDGET})
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
