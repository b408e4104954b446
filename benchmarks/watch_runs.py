"""Small real runs whose logs grow as a framework's do: clean ones, and ones with a fault from a step on.

    python benchmarks/watch_runs.py FOLDER [--only NAME ...]

Each run trains the default policy on arithmetic with a real engine and writes FOLDER/NAME/: `watched-tokens.jsonl`, a
response a line in the documented schema, and `watched-metrics.jsonl`. A fault is made where it would arise: in the
engine's options, the hand-over of the weights, the order of the problems, the seeds, the advantages, the optimizer's
rate, or in what the loop writes. No function of the alarms takes part.
"""

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from tailrl.config.jobs import Run
from tailrl.config.load import parse_study
from tailrl.config.policy import ScratchPolicy
from tailrl.objective.advantages import ESTIMATORS
from tailrl.runtime.errors import StudyError
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import write_problems
from tailrl.tasks.registry import load_task
from tailrl.tracking.metrics import CLIPPED
from tailrl.training import loop, rollouts, step
from tailrl.training.base_policy import write_base_policy
from tailrl.training.guarded_engine import GuardedEngine
from tailrl.training.kept_data import KeptTokens
from tailrl.training.rollouts import ProblemOrder
from tailrl.training.weight_sync import WeightSync

PLAN = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """A run: its arm, steps, seed and settings of training; `fault` with its dose, from step `at` on; and the alarms of
    which one is due."""

    name: str
    arm: dict[str, Any]
    steps: int
    seed: int
    training: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    at: int = 0
    dose: float = 0.0
    alarms: tuple[str, ...] = ()


@cache
def plan() -> dict[str, Any]:
    """What is run: the committed file beside this one."""
    return dict(yaml.safe_load(PLAN.read_text(encoding="utf-8")))


def cases() -> Iterator[Case]:
    """All runs of the plan: clean ones, and each plant with its step, dose and engine drawn by the plan's seed.

    The plants of one number share seed, step and engine, so that they share their steps before the fault.
    """
    for name, values in plan()["clean"].items():
        yield Case(name=name, **values)
    for name, plant in plan()["plants"].items():
        for number in range(plant.get("runs", plan()["runs"])):
            random = np.random.default_rng(derive_seed("plants", plan()["seed"], number))
            at, arm = int(random.integers(*plan()["at"])), plan()["arms"][int(random.integers(len(plan()["arms"])))]
            low, high = np.log(plant.get("doses", (1, 1)))
            dose = np.random.default_rng(derive_seed("dose", plan()["seed"], name, number)).uniform(low, high)
            yield Case(
                name=f"{name}_{number}",
                arm={**arm, **plant.get("arm", {})},
                steps=at + plant.get("after", 4),
                seed=1000 + int(random.integers(1000)),
                training=plant.get("training", {}),
                fault=plant.get("fault", name),
                at=at,
                dose=float(f"{np.exp(dose):.3g}"),
                alarms=tuple(plant["alarms"]),
            )


@dataclass
class Now:
    """Where a run is: its step, the steps whose weights the engine has (`loaded`) or should have (`sent`); `planted`:
    the cases that go on from the step of their plants."""

    case: Case
    folder: Path
    planted: tuple[Case, ...] = ()
    step: int = 0
    sent: int = -1
    loaded: list[int] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    earlier: dict[str, Any] = field(default_factory=dict)

    def faulty(self, name: str) -> bool:
        """Whether this fault is on."""
        return self.case.fault == name and self.step >= self.case.at

    @property
    def version(self) -> int:
        """The step whose weights the engine has: 0 is the base policy."""
        return self.loaded[0] if self.loaded else 0


def run_of(case: Case) -> Run:
    """The settings of a run."""
    training = {**plan()["training"], **case.training, "steps": case.steps, "keep_tokens_every": 1}
    study = {"name": "watched", "task": plan()["task"], "policy": plan()["policy"], "training": training}
    return parse_study({**study, "arms": {"arm": case.arm}}).run("arm")


def train(case: Case, folder: Path) -> None:
    """Train the run of a case; the base policy and the problems lie in `folder`/base."""
    run, base = run_of(case), folder / "base"
    if not (base / "policy" / "config.json").exists():
        make_base(run, base)
    out = folder / case.name
    out.mkdir(parents=True, exist_ok=True)
    with faulty_loop(Now(case, folder)):
        loop.train(run, case.seed, base / "policy", base / "problems.jsonl", out, folder)


def train_together(planted: Sequence[Case], folder: Path) -> None:
    """Train a clean run up to the step of its plants, and from there one process for each of them."""
    first = planted[0]
    steps = max(case.steps for case in planted)
    before = replace(first, name=f"before_{first.name}", fault="", steps=steps)
    run, base = run_of(before), folder / "base"
    if not (base / "policy" / "config.json").exists():
        make_base(run, base)
    (folder / before.name).mkdir(parents=True, exist_ok=True)
    now = Now(before, folder, planted=tuple(planted))
    with faulty_loop(now), suppress(AllPlanted):
        loop.train(run, before.seed, base / "policy", base / "problems.jsonl", folder / before.name, folder)
    shutil.rmtree(folder / before.name)


class AllPlanted(BaseException):
    """Ends the run that the plants began with."""


def make_base(run: Run, base: Path) -> None:
    """Write the problems and the warm-started policy of all runs."""
    base.mkdir(parents=True, exist_ok=True)
    write_problems(load_task(run.task).problems, base / "problems.jsonl")
    assert isinstance(run.policy, ScratchPolicy)
    stages = run.policy.warm_start.stages
    write_problems([one for task in stages for one in load_task(task).problems], base / "warm_start.jsonl")
    write_base_policy(run.policy, base / "warm_start.jsonl", base / "policy")


# --- the faults ----------------------------------------------------------------------------------------


@contextmanager
def faulty_loop(now: Now) -> Iterator[None]:
    """The training loop with the case's fault, and with a log of each step's responses and metrics."""
    places: tuple[Callable[[Now], Any], ...] = (_steps, _weights, _requests, _problems, _samples, _advantages, _log)
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(place(now))
        yield


def _steps(now: Now) -> Any:
    original = step.take_step

    def take_step(job: Any, state: Any, *others: Any) -> Any:
        now.step = state.step
        if now.planted and now.step == now.planted[0].at:
            _go_on(now)
        if now.faulty("rate"):
            rate = job.run.training.learning_rate * now.case.dose
            training = job.run.training.model_copy(update={"learning_rate": rate})
            job = replace(job, run=job.run.model_copy(update={"training": training}))
        found = original(job, state, *others)
        row = {name: value if math.isfinite(value) else None for name, value in found[0].items()}
        if job.run.clip is not None:  # under verl's name: ours is 0 without a clip too
            row["actor/pg_clipfrac"] = row[CLIPPED]
        _write(now, "metrics.jsonl", [row])
        if now.case.fault and not now.planted and now.earlier.get("alone") and now.step + 1 == now.case.steps:
            (now.folder / now.case.name / "done").touch()
            os._exit(0)
        return found

    return patch.object(loop, "take_step", take_step)


def _go_on(now: Now) -> None:
    """One process after the other goes on with a case of its own; then the run ends."""
    for case in now.planted:
        if (now.folder / case.name / "done").exists():
            continue
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        shutil.copytree(now.folder / now.case.name, now.folder / case.name, dirs_exist_ok=True, ignore=_not_logs)
        now.case, now.planted = case, ()
        now.earlier["alone"] = True
        return
    raise AllPlanted


def _not_logs(_: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("watched-")]


def _write(now: Now, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds lines to a log, each written at once as a framework's exporter does."""
    with (now.folder / now.case.name / f"watched-{name}").open("a", encoding="utf-8", buffering=1) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def _weights(now: Now) -> Any:
    original = WeightSync.__call__

    def sync(self: WeightSync, model: Any) -> None:
        now.sent += 1
        if now.case.fault in ("frozen", "frozen_silently") and now.sent > now.case.at:
            return
        if now.case.fault == "rounded" and now.sent >= now.case.at:
            self.disturbance = self.disturbance.model_copy(update={"weights": "float8_e4m3"})
        original(self, model)
        now.loaded = [*now.loaded, now.sent][-self.disturbance.staleness - 1 :]

    return patch.object(WeightSync, "__call__", sync)


def _requests(now: Now) -> Any:
    original = rollouts.step_requests

    def requests(
        prompts: Sequence[tuple[int, ...]], thresholds: Sequence[float], group: int, seed: int, step: int
    ) -> Any:
        given = original(prompts, thresholds, group, seed, step)
        if now.faulty("lost_seed"):
            first = [request for request in given[::group] for _ in range(group)]
            given = [replace(request, seed=one.seed) for request, one in zip(given, first, strict=True)]
        now.prompts = [request.prompt_tokens for request in given]
        return given

    return patch.object(step, "step_requests", requests)


def _problems(now: Now) -> Any:
    original = ProblemOrder.next

    def following(self: ProblemOrder) -> list[int]:
        chosen = original(self)
        if now.case.fault == "stuck_batch" and now.sent >= now.case.at:
            return list(now.earlier["problems"])
        now.earlier["problems"] = chosen
        return chosen

    return patch.object(ProblemOrder, "next", following)


def _samples(now: Now) -> Any:
    original = GuardedEngine.generate

    def generate(self: GuardedEngine, requests: Sequence[Any], decoding: Any, model: Any) -> Any:
        if now.faulty("replayed") and "rollouts" in now.earlier:
            return now.earlier["rollouts"]
        if now.faulty("temperature"):
            decoding = replace(decoding, temperature=now.case.dose)
        if now.faulty("drift"):
            decoding = replace(decoding, temperature=1 - now.case.dose * (now.step - now.case.at))
        if now.faulty("floor"):
            decoding = replace(decoding, disturbance=decoding.disturbance.model_copy(update={"floor": now.case.dose}))
        sent = list(requests)
        if now.faulty("double_bos"):
            sent = [replace(one, prompt_tokens=(one.prompt_tokens[0], *one.prompt_tokens)) for one in requests]
        if now.faulty("prompt_cut"):
            sent = [replace(one, prompt_tokens=one.prompt_tokens[int(now.case.dose) :]) for one in requests]
        rollouts = original(self, sent, decoding, model)
        now.earlier["version"] = now.version
        pairs = zip(rollouts, requests, strict=True)
        now.earlier["rollouts"] = [replace(rollout, prompt_tokens=request.prompt_tokens) for rollout, request in pairs]
        return now.earlier["rollouts"]

    return patch.object(GuardedEngine, "generate", generate)


def _advantages(now: Now) -> Any:
    def wrapped(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def advantages(rewards_PG: Any) -> Any:
            found = original(rewards_PG)
            if now.faulty("scaled_advantage"):
                return found * now.case.dose
            if now.faulty("turned_advantage"):
                return -found
            if now.faulty("shifted_advantage"):
                return found + now.case.dose
            return found

        return advantages

    return patch.dict(ESTIMATORS, {name: wrapped(of) for name, of in ESTIMATORS.items()})


def _log(now: Now) -> Any:
    original = KeptTokens.keep

    def keep(self: KeptTokens, step: int, arrays: Mapping[str, Any]) -> None:
        _write(now, "tokens.jsonl", _rows(now, step, arrays))
        original(self, step, arrays)

    return patch.object(KeptTokens, "keep", keep)


def _rows(now: Now, step: int, arrays: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    version = now.earlier["version"]
    if now.case.fault == "frozen_silently":
        version = step  # the trainer counts what it sent
    if now.faulty("ahead"):
        version += int(now.case.dose)  # the counter is read after the update
    bounds = np.flatnonzero(np.diff(arrays["sequence"], prepend=-1, append=-1))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = {name: values[begin:end] for name, values in arrays.items()}
        prompt = now.prompts[int(part["sequence"][0])]
        trainer = part["logp_train"].astype(float).tolist()
        sampler = trainer if now.faulty("copied") else part["logp_infer"].astype(float).tolist()
        yield {
            "step": step,
            "version": version,
            "token_ids": [*prompt, *part["token"].tolist()],
            "sampler_logprobs": sampler,
            "trainer_logprobs": trainer,
            "advantage": float(part["advantage"][0]),
            "reward": float(part["reward"][0]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "disabled")
    known = {case.name: case for case in cases()}
    if unknown := set(arguments.only) - set(known):
        raise StudyError(f"--only: no run is called {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    chosen = [case for case in known.values() if not arguments.only or case.name in arguments.only]
    left = [case for case in chosen if not (arguments.folder / case.name / "done").exists()]
    together: dict[str, list[Case]] = {}
    for case in left:
        together.setdefault(
            repr((case.arm, case.seed, case.at, case.training)) if case.fault else case.name, []
        ).append(case)
    for group in together.values():
        if group[0].fault:
            train_together(group, arguments.folder)
        else:
            train(group[0], arguments.folder)
            (arguments.folder / group[0].name / "done").touch()


if __name__ == "__main__":
    main()
