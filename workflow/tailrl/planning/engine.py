"""Engine and trainer on one device: the memory of each, and how many sequences the engine has in flight."""

from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.planning.machine import Machine
from tailrl.planning.memory import engine_memory, peak, training_memory
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work


@dataclass(frozen=True, slots=True)
class Placed:
    """Attributes:
    parts: bytes by part, of the trainer and the engine.
    machine: the machine, with as many sequences in flight as its cache has room for.
    lacking: bytes that the trainer or the engine lacks; 0 if both fit.
    """

    parts: dict[str, float]
    machine: Machine
    lacking: float


def place(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> Placed:
    """Place a trainer's shard and an engine (or its slice) on one of n devices; the study sets vLLM's share."""
    trainer = training_memory(shape, run, work, machine, devices)
    engine = engine_memory(shape, run.sampler, work, machine)
    if not machine.gpu or run.sampler.engine != "vllm":
        parts = trainer | engine
        return Placed(parts, machine, max(0.0, peak(parts, run.sampler, machine) - machine.memory))
    share = run.sampler.gpu_memory_utilization * machine.memory
    cache = share - engine["engine's weights"]
    held, one = in_flight(shape, run.sampler, work, machine)
    lacking = max(0.0, one - cache) + max(0.0, machine.reserve + sum(trainer.values()) - (machine.memory - share))
    # vLLM always takes its whole share.
    return Placed(trainer | engine | {"engine's cache": max(cache, one)}, held, lacking)


def in_flight(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> tuple[Machine, float]:
    """The machine with as many full-length sequences as vLLM's share of a GPU holds, and the bytes of one sequence."""
    engine = engine_memory(shape, sampler, work, machine.model_copy(update={"in_flight": 1}))
    one = engine["engine's cache"]
    room = sampler.gpu_memory_utilization * machine.memory - engine["engine's weights"]
    return machine.model_copy(update={"in_flight": max(1, min(machine.in_flight, int(room // one)))}), one
