"""A study's plan: whether it fits its devices, what would, how long it takes, and what its jobs ask a cluster for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tailrl.config.jobs import Run
from tailrl.config.study import MIXTURE, Study
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.training import Training
from tailrl.planning.machine import IN_FLIGHT, Machine, machines
from tailrl.planning.memory import Placed, in_flight, peak, place
from tailrl.planning.shapes import Shape, known_shape, shape_of
from tailrl.planning.times import Floor, sampling_seconds, step_floors, step_seconds
from tailrl.planning.work import Work, work_of
from tailrl.runtime.errors import ConfigurationError

AIME25_PROBLEMS = 30
PROMPT = 200  # tokens of a prompt where nobody says how many
# Of a part of a checkpoint (`training.checkpoint_files`), which all ranks write together.
AT_ONCE_BYTES = 8 * 2**30
# Devices, and bytes of a device, among which something that would fit is looked for.
DEVICES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (24e9, 48e9, 80e9, 96e9, 141e9, 192e9, 288e9)


@dataclass(frozen=True, slots=True)
class Job:
    """One arm's training."""

    run: Run
    work: Work  # a device's share of a step
    placed: Placed
    seconds: dict[str, float]  # of a step, by phase
    floors: dict[str, Floor]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def plan_job(
    shape: Shape, run: Run, machine: Machine, devices: int, prompt: int = PROMPT, response: int | None = None
) -> Job:
    """An arm's job on devices that share it; lengths as `StudyPlan` has them."""
    work = work_of(run.training, prompt, response, devices)
    placed = place(shape, run, work, machine, devices)
    seconds = step_seconds(shape, run, work, placed.machine, devices)
    return Job(run, work, placed, seconds, step_floors(shape, run, work, placed.machine, devices))


@dataclass(frozen=True)
class StudyPlan:
    """What a study takes. Its properties raise StudyError where the policy's sizes are not known."""

    study: Study
    machine: Machine  # one of the devices
    devices: int  # that share a job
    prompt: int = PROMPT  # tokens
    response: int | None = None  # tokens on average; None: all have max_new_tokens

    @cached_property
    def shape(self) -> Shape:
        """The policy's sizes."""
        return shape_of(self.study.policy)

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """Every arm's job, by its name. Raises StudyError where an arm has a mixture in few bits, as no engine has."""
        jobs = {}
        for arm in self.study.arms:
            run = self.study.run(arm)
            if self.shape.experts and run.sampler.quantizes:
                raise ConfigurationError(f"arms.{arm}.sampler.quantization: {MIXTURE}")
            jobs[arm] = plan_job(self.shape, run, self.machine, self.devices, self.prompt, self.response)
        return jobs

    @cached_property
    def fullest(self) -> str:
        """The arm whose step needs the most memory of a device."""
        return max(self.jobs, key=self._peak)

    @cached_property
    def refusal(self) -> str:
        """The sentence where an arm does not fit, with what would; empty where all do."""

        def fits(machine: Machine, devices: int) -> bool:
            jobs = replace(self, machine=machine, devices=devices).jobs.values()
            return not any(job.placed.lacking for job in jobs)

        sharing = max(job.run.sampler.sharing for job in self.jobs.values())
        lacking = max(self.jobs, key=lambda arm: self.jobs[arm].placed.lacking)
        placed = self.jobs[lacking].placed
        largest = max(placed.parts, key=lambda part: placed.parts[part])
        why = f"arm {lacking} lacks {placed.lacking / 1e9:.1f} GB of each, where its largest part is {largest}"
        return refusal(self.shape, self.machine, self.devices, fits, why, sharing)

    @property
    def training_seconds(self) -> float:
        """Seconds to train all runs, one after another."""
        seeds = self.study.arm_seeds()
        return sum(job.step * job.run.training.steps * len(seeds[arm]) for arm, job in self.jobs.items())

    @property
    def policies(self) -> int:
        """Policies to evaluate: the base at each of its temperatures, and each run's snapshots and final one."""
        seeds = self.study.arm_seeds()
        trained = sum((len(job.run.training.snapshots) + 1) * len(seeds[arm]) for arm, job in self.jobs.items())
        return 1 + len(self.study.baselines) + trained

    def _peak(self, arm: str) -> float:
        return peak(self.jobs[arm].placed.parts, self.jobs[arm].run.sampler, self.machine)


def refusal(
    shape: Shape, machine: Machine, devices: int, fits: Callable[[Machine, int], bool], why: str, sharing: int = 1
) -> str:
    """The sentence that a policy does not fit, and what would; empty where it fits.

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


def plan_page(plan: StudyPlan) -> str:
    """The whole page, whose first line says whether the study fits."""
    study, machine, jobs = plan.study, plan.machine, plan.jobs
    seeds = study.arm_seeds()
    slowest = max(jobs, key=lambda arm: jobs[arm].step)
    size = f"{plan.devices} x {machine.memory / 1e9:.3g} GB"
    lines = [f"{study.name}: does not fit: {plan.refusal}" if plan.refusal else f"{study.name}: fits {size}", ""]
    lines += [
        f"{len(jobs)} arms, {sum(len(seeds[arm]) for arm in jobs)} runs, a job on {size}; times at the speed of "
        f"{machine.name}"
    ]
    lines += _sizes(plan.shape, jobs[slowest], plan.devices)
    lines += ["", f"memory of a device, GB (arm {plan.fullest}; a GB is 10^9 bytes)", *_memory(jobs[plan.fullest])]
    lines += ["", f"seconds of a step (arm {slowest}), at the speed of {machine.name}, beside the floor: the least"]
    lines += ["floating-point operations and bytes, at the rates of its data sheet", *_steps(jobs[slowest])]
    if machine.name == Machine().name:
        lines += [f"  --machine {', '.join(machines())} or a file: another machine's speed"]
    if by_verl := [arm for arm, job in jobs.items() if job.run.training.backend == "verl"]:
        lines += ["", *_by_verl(plan, by_verl)]
    return "\n".join([*lines, "", *_whole(plan), "", *_assumed(plan)]) + "\n"


def _sizes(shape: Shape, job: Job, devices: int) -> Iterator[str]:
    work, whole = job.work, job.run.training
    apart = shape.parameters - shape.embedding * (1 if shape.tied else 2)
    yield f"parameters: {shape.parameters / 1e6:,.1f} million, {apart / 1e6:,.1f} without embedding and head"
    if shape.experts:
        yield (
            f"experts: {shape.experts} a layer, {shape.chosen} a token, which meets {shape.active / 1e6:,.1f} million "
            "parameters"
        )
    yield (
        f"a step: {whole.prompts * whole.group_size} responses of {work.response:,} tokens to {whole.prompts} prompts "
        f"of {work.prompt}: {work.sampled * devices:,.0f} sampled tokens; micro-batches of up to {work.batch:,}"
    )


def _memory(job: Job) -> Iterator[str]:
    placed, machine, sampler = job.placed, job.placed.machine, job.run.sampler
    yield from _rows({"libraries": machine.reserve} | placed.parts, 1e9)
    verdict = f"{placed.lacking / 1e9:.1f} missing: it does not fit" if placed.lacking else "it fits"
    needed = peak(placed.parts, sampler, machine) / 1e9
    yield f"  {'at its fullest':<22}{needed:>10.2f}  of {machine.memory / 1e9:g}: {verdict}"
    if sampler.reserved is not None and machine.gpu:
        where = f"of each of the {sampler.sharing} that share one" if sampler.sharing > 1 else "of it"
        yield f"  vLLM has {sampler.reserved:.0%} {where}, with room for {machine.in_flight} sequences in flight"
        yield "  vLLM sleeps while the trainer works: the fuller half of a step counts"


def _steps(job: Job) -> Iterator[str]:
    """A line for each phase: seconds, those of its floor, and what the floor counts."""
    yield f"  {'':<22}{'planned':>10}{'floor':>10}{'times':>8}{'10^12 op.':>11}{'GB moved':>10}"
    floors = {name: floor.seconds(job.placed.machine) for name, floor in job.floors.items()}
    seconds, least = job.seconds | {"a step": job.step}, floors | {"a step": sum(floors.values())}
    phases = job.floors.values()
    whole = Floor(sum(phase.operations for phase in phases), sum(phase.moved for phase in phases))
    for name, floor in (job.floors | {"a step": whole}).items():
        times = seconds[name] / least[name]
        yield (
            f"  {name:<22}{seconds[name]:>10.2f}{least[name]:>10.2f}{times:>8.1f}{floor.operations / 1e12:>11,.1f}"
            f"{floor.moved / 1e9:>10,.1f}"
        )


def _by_verl(plan: StudyPlan, arms: list[str]) -> Iterator[str]:
    """What arms that verl trains need besides."""
    kept = max(2, plan.study.training.keep_checkpoints) + 1
    # verl saves weights and moments in float32, and the policy in bfloat16 as Hugging Face has it.
    saved = kept * (checkpoint_bytes(plan.shape, plan.study.training) + 2 * plan.shape.parameters) / 1e9
    yield f"verl trains {', '.join(arms)}: an environment of its own with vLLM (envs/verl.txt; TAILRL_VERL_PYTHON)"
    yield f"  Ray with {plan.devices} GPUs, started on this machine, or one that RAY_ADDRESS names"
    yield f"  disk: {saved:,.1f} GB of verl's own checkpoints for each job, which are removed when it has finished"
    yield "  time: verl scores each response once more before its update, a third of forward and backward"
    yield "  memory: as above, with a bfloat16 trainer; verl's own allocations were not measured"


def _whole(plan: StudyPlan) -> Iterator[str]:
    study, shape, devices, policies = plan.study, plan.shape, plan.devices, plan.policies
    each = evaluation_seconds(study, plan.machine, plan.prompt)
    training, evaluating = plan.training_seconds / 3600, policies * (each or 0.0) / 3600
    known = "" if each is not None else ", the evaluation not among them: how many problems it has is not known before"
    yield (
        f"whole study: {training:,.1f} h of training on {devices}, {evaluating:,.1f} h of evaluating {policies} "
        f"policies on 1: {devices * training + evaluating:,.0f} device-hours{known}"
    )
    # Each rank gets the sampler's logits of all ranks.
    rows = max(job.placed.parts.get("sampler's logits", 0.0) for job in plan.jobs.values())
    rows *= devices**2 if plan.machine.gpu else devices
    host = host_bytes(shape, study.training, devices) + rows
    logits = ", and the sampler's logits" if rows else ""
    yield (
        f"host memory: {host / 1e9:,.1f} GB: the policy's file, which all ranks share, what is being written{logits}"
    )
    kept, state = study.training.keep_checkpoints + 1, checkpoint_bytes(shape, study.training)
    yield (
        f"disk: {4 * shape.parameters * policies / 1e9:,.1f} GB of policies, and {kept * state / 1e9:,.1f} GB of "
        f"checkpoints for each job that runs ({kept} of {state / 1e9:,.1f})"
    )


def _assumed(plan: StudyPlan) -> Iterator[str]:
    length = f"responses of {plan.response} tokens" if plan.response else "every response as long as it may be"
    yield f"assumed: prompts of {plan.prompt} tokens, {length}, and of the machine"
    for name, field in Machine.model_fields.items():
        if name not in ("name", "gpu", "memory"):
            value = getattr(plan.machine, name)
            yield f"  {name:<14}{'as matmul' if value is None else f'{value:.3g}':>10}  {field.description}"
    yield "  no time to quantise weights at a hand-over, nor for the roundings of a quantised engine's matched control"


def _rows(values: dict[str, float], unit: float) -> Iterator[str]:
    for name, value in values.items():
        yield f"  {name:<22}{value / unit:>10.2f}"


# --- what jobs ask a cluster for --------------------------------------------------------------------------

# Bytes of a process besides the policy (libraries, the engine's and CUDA's buffers), and for the logits of two engines
# that are compared.
PROCESS_BYTES, COMPARED_BYTES = 12e9, 48e9
HOUR, DAY = 60, 1440


@dataclass(frozen=True, slots=True)
class Asked:
    """Memory in megabytes (10^6 bytes), time in minutes.

    A cluster ends a job that takes more than it asked for. Throughputs are from data sheets, so twice the planned time
    is asked for. Partitions allow a day at least: a longer training or evaluation goes on in the next job.
    """

    mem_mb: int = 64_000
    runtime: int = DAY

    @classmethod
    def of(cls, size: float, minutes: float) -> "Asked":
        """For so many bytes and planned minutes."""
        return cls(round(size / 1e6), min(DAY, max(HOUR, round(2 * minutes))))


UNKNOWN = Asked()  # the policy's sizes are not known before it is there


def policy_request(study: Study) -> Asked:
    """What the base policy's job asks for. It reads and writes all weights."""
    shape = known_shape(study.policy)
    return UNKNOWN if shape is None else Asked.of(8 * shape.parameters + PROCESS_BYTES, 2 * HOUR)


def training_request(study: Study, run: Run, ranks: int) -> Asked:
    """Of a training job of one arm, on so many GPUs of one machine."""
    shape = known_shape(study.policy)
    if shape is None:
        return UNKNOWN
    job = plan_job(shape, run, Machine(), ranks)
    each = PROCESS_BYTES + ranks * job.placed.parts.get("sampler's logits", 0.0)
    return Asked.of(host_bytes(shape, run.training, ranks) + ranks * each, run.training.steps * job.step / 60)


def evaluation_request(study: Study, policies: int, ranks: int) -> Asked:
    """What an arm's evaluation asks for. Each process reads one policy at a time."""
    shape = known_shape(study.policy)
    if shape is None:
        return UNKNOWN
    seconds = evaluation_seconds(study, Machine())
    minutes = DAY if seconds is None else -(-policies // ranks) * seconds / 60
    return Asked.of(ranks * (4 * shape.parameters + PROCESS_BYTES), minutes)


def comparison_request(study: Study) -> Asked:
    """What the job asks for that compares an engine's distributions with the trainer's."""
    shape = known_shape(study.policy)
    return UNKNOWN if shape is None else Asked.of(4 * shape.parameters + PROCESS_BYTES + COMPARED_BYTES, 2 * HOUR)
