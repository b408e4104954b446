"""What a job asks a cluster for: the machine's memory and time, by the plan.

A cluster ends a job that takes more than it asked for. Twice the planned time is asked for, since throughputs are from
data sheets, and a day at most, which partitions allow: training and evaluation go on in the next job.
"""

from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.study import Study
from tailrl.planning.machine import Machine
from tailrl.planning.memory import place
from tailrl.planning.plan import PROMPT, evaluation_seconds, host_bytes
from tailrl.planning.shapes import known_shape
from tailrl.planning.times import step_seconds
from tailrl.planning.work import work_of

PROCESS_BYTES = 12e9
"""Bytes of a process besides the policy: libraries, the engine's and CUDA's buffers."""
COMPARED_BYTES = 48e9
"""Bytes for the logits of two engines that are compared."""
HOUR, DAY = 60, 1440


@dataclass(frozen=True, slots=True)
class Asked:
    """Memory in megabytes (10^6 bytes), time in minutes."""

    mem_mb: int
    runtime: int


UNKNOWN = Asked(64_000, DAY)
"""Where the policy's sizes are not known before it is there."""


def policy_request(study: Study) -> Asked:
    """What the base policy's job asks for. It reads and writes all weights."""
    shape = known_shape(study.policy)
    return UNKNOWN if shape is None else _request(8 * shape.parameters + PROCESS_BYTES, 2 * HOUR)


def training_request(study: Study, run: Run, ranks: int) -> Asked:
    """Of a training job of one arm, on so many GPUs of one machine."""
    shape, machine = known_shape(study.policy), Machine()
    if shape is None:
        return UNKNOWN
    work = work_of(run.training, PROMPT, None, ranks)
    placed = place(shape, run, work, machine, ranks)
    seconds = run.training.steps * sum(step_seconds(shape, run, work, placed.machine, ranks).values())
    each = PROCESS_BYTES + ranks * placed.parts.get("sampler's logits", 0.0)
    return _request(host_bytes(shape, run.training, ranks) + ranks * each, seconds / 60)


def evaluation_request(study: Study, policies: int, ranks: int) -> Asked:
    """What an arm's evaluation asks for. Each process reads one policy at a time."""
    shape = known_shape(study.policy)
    if shape is None:
        return UNKNOWN
    seconds = evaluation_seconds(study, Machine())
    minutes = DAY if seconds is None else -(-policies // ranks) * seconds / 60
    return _request(ranks * (4 * shape.parameters + PROCESS_BYTES), minutes)


def comparison_request(study: Study) -> Asked:
    """What the job asks for that compares an engine's distributions with the trainer's."""
    shape = known_shape(study.policy)
    return UNKNOWN if shape is None else _request(4 * shape.parameters + PROCESS_BYTES + COMPARED_BYTES, 2 * HOUR)


def _request(size: float, minutes: float) -> Asked:
    return Asked(round(size / 1e6), min(DAY, max(HOUR, round(2 * minutes))))
