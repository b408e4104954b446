"""Where engine and trainer lie on a device: over how many devices an engine spreads, and what it has in flight."""

from dataclasses import dataclass

from tailrl.planning.machine import Machine
from tailrl.planning.memory import engine_memory, peak, training_memory
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work
from tailrl.settings import Run


@dataclass(frozen=True, slots=True)
class Placed:
    """Attributes:
    parts: bytes of a device by part, trainer and engine.
    shards: devices that share an engine.
    machine: with the sequences in flight for whose keys and values there is room.
    """

    parts: dict[str, float]
    shards: int
    machine: Machine


def place_engine(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> Placed:
    """The engine over as few devices as hold it beside the trainer with all its sequences in flight; where none do,
    over those with the most of them, and over all where not even one sequence fits."""
    trainer = training_memory(shape, run, work, machine, devices)
    if not machine.gpu or run.sampler.engine != "vllm":
        return Placed(trainer | engine_memory(shape, run.sampler, work, machine, 1), 1, machine)
    tried = []
    shards = 1
    while shards <= devices:
        one = machine.model_copy(update={"in_flight": 1})
        engine = engine_memory(shape, run.sampler, work, one, shards)
        room = machine.memory - peak(trainer | engine, run.sampler, machine)
        wanted = min(machine.in_flight, max(1, round(work.sequences * shards)))
        fits = 1 + int(room // engine["engine's cache"])
        held = machine.model_copy(update={"in_flight": max(1, min(wanted, fits))})
        parts = trainer | engine_memory(shape, run.sampler, work, held, shards)
        tried.append((min(wanted, fits) / wanted, Placed(parts, shards, held)))
        shards *= 2
    best = max(share for share, _ in tried)
    chosen = [placed for share, placed in tried if share == best]
    return chosen[0] if best > 0 else chosen[-1]
