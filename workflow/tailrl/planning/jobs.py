"""The jobs of a study as planned: what each needs, and the sentence where that is more than there is."""

from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.study import MIXTURE, Study
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.training import Training
from tailrl.planning.machine import IN_FLIGHT, Machine
from tailrl.planning.memory import Placed, in_flight, place, sleeps
from tailrl.planning.refusal import refusal
from tailrl.planning.shapes import Shape, shape_of
from tailrl.planning.times import sampling_seconds, step_seconds
from tailrl.planning.work import Work, work_of
from tailrl.runtime.errors import StudyError

AIME25_PROBLEMS = 30
PROMPT = 200
"""Tokens of a prompt where nobody says how many."""
AT_ONCE_BYTES = 8 * 2**30
"""A part of a checkpoint (`training.checkpoint_files`), which all ranks write together."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One arm's job."""

    run: Run
    work: Work  # a device's share of a step
    placed: Placed
    seconds: dict[str, float]  # of a step, by phase


def plan_arms(
    study: Study, machine: Machine, devices: int, prompt: int = PROMPT, response: int | None = None
) -> dict[str, Planned]:
    """Every arm's job on `devices` devices, by its name.

    Args:
        study: the study to plan.
        machine: one of the devices.
        devices: devices that share a job.
        prompt: tokens of a prompt.
        response: tokens of a response on average; None: all have max_new_tokens.

    Raises:
        StudyError: the policy's sizes are not known, or an arm has a mixture in few bits, as no engine has.
    """
    shape = shape_of(study.policy)
    planned = {}
    for arm in study.arms:
        run = study.run(arm)
        if shape.experts and run.sampler.quantizes:
            raise StudyError(f"arms.{arm}.sampler.quantization: {MIXTURE}")
        work = work_of(run.training, prompt, response, devices)
        placed = place(shape, run, work, machine, devices)
        planned[arm] = Planned(run, work, placed, step_seconds(shape, run, work, placed.machine, devices))
    return planned


def what_would_fit(
    study: Study, machine: Machine, devices: int, prompt: int = PROMPT, response: int | None = None
) -> str:
    """The sentence where a policy does not fit its devices, with what would; empty where it does. See `plan_arms`."""

    def fits(machine: Machine, devices: int) -> bool:
        planned = plan_arms(study, machine, devices, prompt, response).values()
        return not any(arm.placed.lacking for arm in planned)

    samplers = [study.run(arm).sampler for arm in study.arms]
    billions = shape_of(study.policy).parameters / 1e9
    each = 16 if study.training.optimizer == "adamw" else 12
    room = machine.memory - machine.reserve
    # In the update all of them, while vLLM sleeps; in the rollout no gradients, beside vLLM's share.
    share = max((sampler.reserved or 0.0) * sleeps(sampler, machine) for sampler in samplers) * machine.memory
    most = devices * max(0.0, min(room / each, (room - share) / (each - 4))) / 1e9
    why = (
        f"training takes {each} bytes a parameter, {each * billions:.0f} GB, and room is for {most:.1f} billion less "
        "activations"
    )
    sharing = max(sampler.sharing for sampler in samplers)
    return refusal(shape_of(study.policy), machine, devices, fits, why, sharing)


def training_seconds(
    study: Study, machine: Machine, devices: int, prompt: int = PROMPT, response: int | None = None
) -> float:
    """Seconds to train all runs, one after another. See `plan_arms`."""
    seeds = study.arm_seeds()
    planned = plan_arms(study, machine, devices, prompt, response)
    return sum(sum(job.seconds.values()) * job.run.training.steps * len(seeds[arm]) for arm, job in planned.items())


def policies_of(study: Study) -> int:
    """Policies to evaluate: the base at each of its temperatures, and each run's snapshots and final one."""
    seeds = study.arm_seeds()
    trained = sum((len(study.run(arm).training.snapshots) + 1) * len(seeds[arm]) for arm in study.arms)
    return 1 + len(study.baselines) + trained


def host_bytes(shape: Shape, training: Training, ranks: int) -> float:
    """Bytes of a machine's own memory for a job: the policy's float32 file, and what is being written.

    Ranks map the file and share its pages. A checkpoint is written in parts, one at a time, which is there twice. Of
    several ranks the first has the whole policy for a snapshot.
    """
    whole = 4 * shape.parameters
    return whole + (
        2 * min(checkpoint_bytes(shape, training), AT_ONCE_BYTES) if ranks == 1 else whole + 2 * AT_ONCE_BYTES
    )


def checkpoint_bytes(shape: Shape, training: Training) -> float:
    """Bytes of a checkpoint: weights and the optimizer's state, in float32."""
    return 4 * shape.parameters * (3 if training.optimizer == "adamw" else 2)


def evaluation_seconds(study: Study, machine: Machine, prompt: int = PROMPT) -> float | None:
    """Seconds to evaluate one policy on one device; None if the number of problems is not known beforehand."""
    evaluation, shape = study.evaluation, shape_of(study.policy)
    problems = evaluation.task.problems or (AIME25_PROBLEMS if isinstance(evaluation.task, Aime25Task) else None)
    if problems is None:
        return None
    work = Work(problems, evaluation.samples, prompt, evaluation.max_new_tokens, study.training.token_budget)
    share = evaluation.sampler.reserved
    if machine.gpu and share is not None:
        most = machine.model_copy(update={"in_flight": IN_FLIGHT})
        machine, _ = in_flight(shape, evaluation.sampler, share, work, most)
    return sampling_seconds(shape, evaluation.sampler, work, machine)
