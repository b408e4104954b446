"""A study's plan: whether it fits its devices, what would, how long it takes, and what its jobs ask a cluster for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tailrl.config.jobs import Run
from tailrl.config.study import MIXTURE, Study
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.training import Training
from tailrl.planning.machine import Machine, machines
from tailrl.planning.memory import Parts, distribution_bytes, engine_of, peak, trainer_parts
from tailrl.planning.shapes import Shape, known_shape, shape_of
from tailrl.planning.times import Phase, rollout_phase, step_phases
from tailrl.planning.work import Work, work_of
from tailrl.runtime.errors import ConfigurationError
from tailrl.runtime.templates import renderer

AIME25_PROBLEMS = 30
PROMPT = 200  # tokens of a prompt where nobody says how many
# Of a part of a checkpoint (`training.checkpoint_files`), which all ranks write together.
AT_ONCE_BYTES = 8 * 2**30
# Devices, and bytes of a device, among which something that would fit is looked for.
DEVICES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (24e9, 48e9, 80e9, 96e9, 141e9, 192e9, 288e9)


@dataclass(frozen=True, slots=True)
class Job:
    """One arm's training, as one of its devices sees it."""

    run: Run
    work: Work  # a device's share of a step
    machine: Machine  # with as many sequences in flight as the engine has room for
    parts: Parts
    lacking: float  # bytes that the trainer or the engine lacks; 0 if both fit
    phases: dict[str, Phase]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases.values())

    def floor(self, machine: Machine) -> float:
        """The least seconds of a step: the sum of the phases' floors."""
        return sum(phase.floor(machine) for phase in self.phases.values())


def plan_job(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> Job:
    """An arm's job: the trainer's shard and an engine, or a slice of one, on each of the devices."""
    engine = engine_of(shape, run.sampler, work, machine)
    parts = trainer_parts(shape, run, work, machine, devices) | engine.parts
    lacking = max(0.0, engine.lacking, peak(parts) - machine.memory)
    machine = machine.model_copy(update={"in_flight": engine.in_flight})
    return Job(run, work, machine, parts, lacking, step_phases(shape, run, work, machine, devices))


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
            work = work_of(run.training, self.prompt, self.response, self.devices)
            jobs[arm] = plan_job(self.shape, run, work, self.machine, self.devices)
        return jobs

    @cached_property
    def refusal(self) -> str:
        """The sentence where an arm does not fit, with what would; empty where all do."""

        def fits(machine: Machine, devices: int) -> bool:
            jobs = replace(self, machine=machine, devices=devices).jobs.values()
            return not any(job.lacking for job in jobs)

        sharing = max(job.run.sampler.sharing for job in self.jobs.values())
        arm, job = max(self.jobs.items(), key=lambda item: item[1].lacking)
        largest = max(job.parts, key=lambda part: max(job.parts[part]))
        why = f"arm {arm} lacks {job.lacking / 1e9:.1f} GB of each, where its largest part is {largest}"
        return refusal(self.shape, self.machine, self.devices, fits, why, sharing)

    @property
    def slowest(self) -> str:
        """The arm whose step takes the longest."""
        return max(self.jobs, key=lambda arm: self.jobs[arm].step)

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

    @property
    def host_bytes(self) -> float:
        """Bytes of the machine's own memory, of the arm that needs the most."""
        return max(host_bytes(self.shape, job.run, job.work, self.devices) for job in self.jobs.values())


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


def host_bytes(shape: Shape, run: Run, work: Work, ranks: int) -> float:
    """Bytes of a machine's own memory for a job: the policy's float32 file, what is being written, sampler's logits.

    Ranks map the file and share its pages. A checkpoint is written in parts, one at a time, which is there twice. Of
    several ranks the first has the whole policy for a snapshot.
    """
    whole = 4 * shape.parameters
    # Each rank has the logits of all ranks.
    rows = ranks * distribution_bytes(shape, ranks * work.sampled) if run.needs_distributions else 0.0
    if ranks == 1:
        return whole + 2 * min(checkpoint_bytes(shape, run.training), AT_ONCE_BYTES) + rows
    return 2 * whole + 2 * AT_ONCE_BYTES + rows


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
    length = evaluation.max_new_tokens
    work = Work(problems, responses, prompt, length, study.training.token_budget, longest=length)
    engine = engine_of(shape, evaluation.sampler, work, machine)
    held = machine.model_copy(update={"in_flight": engine.in_flight})
    return rollout_phase(shape, evaluation.sampler, work, held).seconds


# --- the page ---------------------------------------------------------------------------------------------


render = renderer(Path(__file__).parent)


def plan_page(plan: StudyPlan) -> str:
    """The whole page, whose first line says whether the study fits."""
    shape = plan.shape
    machine = plan.machine
    training = plan.study.training
    fullest = max(plan.jobs, key=lambda arm: peak(plan.jobs[arm].parts))
    each = evaluation_seconds(plan.study, machine, plan.prompt)
    seeds = plan.study.arm_seeds()
    state = checkpoint_bytes(shape, training)
    return render(
        "plan.txt.j2",
        plan=plan,
        machine=machine,
        machines=machines(),
        usual=Machine().name,
        runs=sum(len(seeds[arm]) for arm in plan.jobs),
        apart=shape.parameters - shape.embedding * (1 if shape.tied else 2),
        slowest=plan.jobs[plan.slowest],
        fullest=fullest,
        most=plan.jobs[fullest],
        peak=peak(plan.jobs[fullest].parts),
        by_verl=[arm for arm, job in plan.jobs.items() if job.run.training.backend == "verl"],
        # verl saves weights and moments in float32, and the policy in bfloat16 as Hugging Face has it.
        saved_by_verl=(max(2, training.keep_checkpoints) + 1) * (state + 2 * shape.parameters),
        training_hours=plan.training_seconds / 3600,
        evaluating_hours=None if each is None else plan.policies * each / 3600,
        needs_logits=any(job.run.needs_distributions for job in plan.jobs.values()),
        kept=training.keep_checkpoints + 1,
        state=state,
        assumed={
            name: (getattr(machine, name), field.description)
            for name, field in Machine.model_fields.items()
            if name not in ("name", "gpu", "memory")
        },
    )


# --- what jobs ask a cluster for --------------------------------------------------------------------------

# Bytes of a process besides the policy (libraries, the engine's and CUDA's buffers), and for the logits of two engines
# that are compared.
PROCESS_BYTES, COMPARED_BYTES = 12e9, 48e9
HOUR, DAY = 60, 1440


@dataclass(frozen=True, slots=True)
class Asked:
    """Memory in megabytes (10^6 bytes), time in minutes; the defaults are for a policy of unknown sizes.

    A cluster ends a job that takes more than it asked for. Throughputs are from data sheets, so twice the planned time
    is asked for. Partitions allow a day at least: a longer training or evaluation goes on in the next job.
    """

    mem_mb: int = 64_000
    runtime: int = DAY


def request(study: Study, needs: Callable[[Shape], tuple[float, float]]) -> Asked:
    """What a job asks for that needs so many bytes and planned minutes, by the policy's sizes."""
    shape = known_shape(study.policy)
    if shape is None:
        return Asked()
    size, minutes = needs(shape)
    return Asked(round(size / 1e6), min(DAY, max(HOUR, round(2 * minutes))))


def policy_request(study: Study) -> Asked:
    """Of the base policy's job, which reads and writes all weights."""
    return request(study, lambda shape: (8 * shape.parameters + PROCESS_BYTES, 2 * HOUR))


def training_request(study: Study, run: Run, ranks: int) -> Asked:
    """Of a training job of one arm, on so many GPUs of one machine."""

    def needs(shape: Shape) -> tuple[float, float]:
        job = plan_job(shape, run, work_of(run.training, PROMPT, None, ranks), Machine(), ranks)
        size = host_bytes(shape, run, job.work, ranks) + ranks * PROCESS_BYTES
        return size, run.training.steps * job.step / 60

    return request(study, needs)


def evaluation_request(study: Study, policies: int, ranks: int) -> Asked:
    """Of an arm's evaluation. Each process reads one policy at a time."""

    def needs(shape: Shape) -> tuple[float, float]:
        seconds = evaluation_seconds(study, Machine())
        minutes = DAY if seconds is None else -(-policies // ranks) * seconds / 60
        return ranks * (4 * shape.parameters + PROCESS_BYTES), minutes

    return request(study, needs)


def comparison_request(study: Study) -> Asked:
    """What the job asks for that compares an engine's distributions with the trainer's."""
    return request(study, lambda shape: (4 * shape.parameters + PROCESS_BYTES + COMPARED_BYTES, 2 * HOUR))
