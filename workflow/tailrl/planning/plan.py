"""The plan of a study: each arm's job, whether it fits its devices, what would, and the page of `tailrl plan`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.study import MIXTURE, Study
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.training import Training
from tailrl.planning.machine import IN_FLIGHT, Machine
from tailrl.planning.memory import Placed, in_flight, peak, place, sleeps
from tailrl.planning.shapes import Shape, shape_of
from tailrl.planning.times import sampling_seconds, step_seconds
from tailrl.planning.work import Work, work_of
from tailrl.runtime.errors import StudyError

AIME25_PROBLEMS = 30
PROMPT = 200  # tokens of a prompt where nobody says how many
# Of a part of a checkpoint (`training.checkpoint_files`), which all ranks write together.
AT_ONCE_BYTES = 8 * 2**30
# Devices, and bytes of a device, among which something that would fit is looked for.
DEVICES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (24e9, 48e9, 80e9, 96e9, 141e9, 192e9, 288e9)


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


def refusal(
    shape: Shape, machine: Machine, devices: int, fits: Callable[[Machine, int], bool], why: str, sharing: int = 1
) -> str:
    """The sentence; empty where the policy fits.

    Args:
        shape: the policy's sizes.
        machine: one of the devices.
        devices: devices that share the job.
        fits: whether the policy fits so many devices of a kind.
        why: what takes the memory, in a few words.
        sharing: devices that share an engine, which must divide theirs.
    """
    if fits(machine, devices):
        return ""
    more = next((n for n in DEVICES if n > devices and n % sharing == 0 and fits(machine, n)), None)
    sized = (machine.model_copy(update={"memory": size}) for size in SIZES if size > machine.memory)
    larger = next((one.memory for one in sized if fits(one, devices)), None)
    would = [f"{more} such devices would (--set-resources train:ranks={more})"] if more else []
    would += [f"{devices} of {larger / 1e9:g} GB would"] if larger else []
    nothing = "no more and no larger devices would, but a smaller training.token_budget might"
    return (
        f"a policy of {shape.parameters / 1e9:.1f} billion parameters does not fit {devices} x "
        f"{machine.memory / 1e9:.3g} GB: {why}; {' or '.join(would) or nothing}"
    )


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
    if ranks == 1:
        return whole + 2 * min(checkpoint_bytes(shape, training), AT_ONCE_BYTES)
    return 2 * whole + 2 * AT_ONCE_BYTES


def checkpoint_bytes(shape: Shape, training: Training) -> float:
    """Bytes of a checkpoint: weights and the optimizer's state, in float32."""
    return 4 * shape.parameters * (3 if training.optimizer == "adamw" else 2)


def evaluation_seconds(study: Study, machine: Machine, prompt: int = PROMPT) -> float | None:
    """Seconds to evaluate one policy on one device; None if the number of problems is not known beforehand."""
    evaluation, shape = study.evaluation, shape_of(study.policy)
    problems = evaluation.task.problems or (AIME25_PROBLEMS if isinstance(evaluation.task, Aime25Task) else None)
    if problems is None:
        return None
    responses = evaluation.samples + evaluation.greedy
    work = Work(problems, responses, prompt, evaluation.max_new_tokens, study.training.token_budget)
    share = evaluation.sampler.reserved
    if machine.gpu and share is not None:
        most = machine.model_copy(update={"in_flight": IN_FLIGHT})
        machine, _ = in_flight(shape, evaluation.sampler, share, work, most)
    return sampling_seconds(shape, evaluation.sampler, work, machine)


# --- the page ---------------------------------------------------------------------------------------------


def plan_page(study: Study, machine: Machine, devices: int, prompt: int, response: int | None) -> str:
    """The whole page, whose first line says whether the study fits.

    Args:
        study: the study to plan.
        machine: one of the devices.
        devices: devices that share a job.
        prompt: tokens of a prompt.
        response: tokens of a response; None: max_new_tokens.

    Raises:
        StudyError: the policy's sizes are not known.
    """
    shape = shape_of(study.policy)
    seeds = study.arm_seeds()
    runs = sum(len(seeds[arm]) for arm in study.arms)
    planned = plan_arms(study, machine, devices, prompt, response)
    fullest = max(planned, key=lambda arm: peak(planned[arm].placed.parts, planned[arm].run.sampler, machine))
    slowest = max(planned, key=lambda arm: sum(planned[arm].seconds.values()))
    size = f"{devices} x {machine.memory / 1e9:.3g} GB"
    lacking = what_would_fit(study, machine, devices, prompt, response)
    lines = [f"{study.name}: does not fit: {lacking}" if lacking else f"{study.name}: fits {size}", ""]
    lines += [f"{len(study.arms)} arms, {runs} runs, a job on {size}; times at the speed of {machine.name}"]
    lines += _sizes(shape, planned[slowest], devices)
    lines += ["", f"memory of a device, GB (arm {fullest}; a GB is 10^9 bytes)", *_memory(planned[fullest])]
    seconds = planned[slowest].seconds
    lines += ["", f"seconds of a step (arm {slowest}), at the speed of {machine.name}"]
    lines += _rows(seconds | {"a step": sum(seconds.values())}, 1)
    if machine.name == Machine().name:
        lines += ["  on another device the rollout takes longer as its bandwidth is less, forward and backward as its"]
        lines += ["  matmul is less: a file with these, --machine FILE, has the plan use them"]
    rows = devices * max(arm.placed.parts.get("sampler's logits", 0.0) for arm in planned.values())
    rows *= devices if machine.gpu else 1  # each rank gets those of all ranks
    lines += ["", *_whole(study, shape, machine, devices, prompt, response, rows)]
    lines += ["", *_assumed(machine, prompt, response)]
    return "\n".join(lines) + "\n"


def _sizes(shape: Shape, planned: Planned, devices: int) -> Iterator[str]:
    work, whole = planned.work, planned.run.training
    tokens = work.sampled * devices
    apart = shape.parameters - shape.embedding * (1 if shape.tied else 2)
    yield f"parameters: {shape.parameters / 1e6:,.1f} million, {apart / 1e6:,.1f} without embedding and head"
    if shape.experts:
        yield (
            f"experts: {shape.experts} a layer, {shape.chosen} a token, which meets {shape.active / 1e6:,.1f} million "
            "parameters"
        )
    yield (
        f"a step: {whole.prompts * whole.group_size} responses of {work.response:,} tokens to {whole.prompts} prompts "
        f"of {work.prompt}: {tokens:,.0f} sampled tokens; micro-batches of up to {work.batch:,}"
    )


def _memory(planned: Planned) -> Iterator[str]:
    placed, machine, sampler = planned.placed, planned.placed.machine, planned.run.sampler
    yield from _rows({"libraries": machine.reserve} | placed.parts, 1e9)
    needed = peak(placed.parts, sampler, machine)
    verdict = f"{placed.lacking / 1e9:.1f} missing: it does not fit" if placed.lacking else "it fits"
    yield f"  {'at its fullest':<22}{needed / 1e9:>10.2f}  of {machine.memory / 1e9:g}: {verdict}"
    if placed.lacking:
        yield f"  the largest part is {max(placed.parts, key=lambda part: placed.parts[part])}"
    share = sampler.reserved
    if share is not None and machine.gpu:
        shared = sampler.sharing
        where = f"of each of the {shared} that share one" if shared > 1 else "of it"
        yield f"  vLLM has {share:.0%} {where}, with room for {machine.in_flight} sequences in flight"
        yield "  vLLM sleeps while the trainer works: the fuller half of a step counts"


def _whole(
    study: Study, shape: Shape, machine: Machine, devices: int, prompt: int, response: int | None, rows: float
) -> Iterator[str]:
    """`rows`: bytes of the sampler's logits that the fullest arm's ranks hold in the machine's memory."""
    training = training_seconds(study, machine, devices, prompt, response)
    policies = policies_of(study)
    each = evaluation_seconds(study, machine, prompt)
    evaluating = policies * (each or 0.0) / 3600
    known = "" if each is not None else ", the evaluation not among them: how many problems it has is not known before"
    yield (
        f"whole study: {training / 3600:,.1f} h of training on {devices}, {evaluating:,.1f} h of evaluating {policies} "
        f"policies on 1: {devices * training / 3600 + evaluating:,.0f} device-hours{known}"
    )
    state = checkpoint_bytes(shape, study.training)
    kept = study.training.keep_checkpoints + 1
    disk = 4 * shape.parameters * policies
    host = host_bytes(shape, study.training, devices) + rows
    logits = ", and the sampler's logits" if rows else ""
    yield (
        f"host memory: {host / 1e9:,.1f} GB: the policy's file, which all ranks share, what is being written{logits}"
    )
    yield (
        f"disk: {disk / 1e9:,.1f} GB of policies, and {kept * state / 1e9:,.1f} GB of checkpoints for each job that "
        f"runs ({kept} of {state / 1e9:,.1f})"
    )


def _assumed(machine: Machine, prompt: int, response: int | None) -> Iterator[str]:
    length = "every response as long as it may be" if response is None else f"responses of {response} tokens"
    yield f"assumed: prompts of {prompt} tokens, {length}, and of the machine"
    for name, field in Machine.model_fields.items():
        if name not in ("name", "gpu", "memory"):
            value = getattr(machine, name)
            yield f"  {name:<14}{'as matmul' if value is None else f'{value:.3g}':>10}  {field.description}"
    yield "  no time to quantise weights at a hand-over, nor for the roundings of a quantised engine's matched control"


def _rows(values: dict[str, float], unit: float) -> Iterator[str]:
    for name, value in values.items():
        yield f"  {name:<22}{value / unit:>10.2f}"
