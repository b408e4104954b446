"""Seconds of one step, by phase, on one of n devices: counted work over the machine's throughput.

Matrix products: six operations a parameter and token for forward and backward, eight with activation checkpointing,
and eight times the width a logit, because the log-probs' forward is done twice. Attention has two products forward and
five backward, which computes its scores again, each over half of all pairs of positions. The rest is memory traffic
(`Machine.passes`). A token's sampling takes the larger of compute time and of the time to read weights and cache, plus
a fixed cost a layer.

A floor is the least time that any implementation needs: the bare formulas' products at the full rate, or one pass over
the data at the full bandwidth. It assumes that nothing is computed twice and that no device waits.
"""

from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.planning.machine import Machine
from tailrl.planning.memory import BYTES, activations, cached_bytes, policy_bytes, product_bytes
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work


@dataclass(frozen=True, slots=True)
class Phase:
    """What a phase of a step takes on one device, and the least that it computes and moves."""

    seconds: float  # planned
    operations: float  # floating-point
    moved: float  # bytes to and from the device's memory

    def floor(self, machine: Machine) -> float:
        """The least seconds: the larger of operations and bytes at the data sheet's rates."""
        return max(self.operations / machine.matmul, self.moved / machine.bandwidth)


def step_phases(shape: Shape, run: Run, work: Work, machine: Machine, devices: int = 1) -> dict[str, Phase]:
    """The phases of a step by name, with as many sequences in flight as the machine says."""
    # AdamW reads weight, gradient and two moments and writes three of them; the norm reads the gradient once more.
    moments = 2 if run.training.optimizer == "adamw" else 1
    stepped = 4 * shape.parameters * (4 + 2 * moments) / devices
    # Sharded weights are gathered, read in float32 and written in the engine's format.
    gathered = 4 * shape.parameters / machine.link if devices > 1 else 0.0
    handed = 4 * shape.parameters + policy_bytes(shape, run.sampler)
    return {
        "rollout": rollout_phase(shape, run.sampler, work, machine),
        "forward and backward": update_phase(shape, run, work, machine, devices),
        "optimizer": Phase(stepped / machine.bandwidth, 0.0, stepped),
        "weights": Phase(gathered + handed / machine.bandwidth, 0.0, handed),
    }


def rollout_phase(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> Phase:
    """Sampling all of a device's sequences, in rounds of the engine's sequences in flight.

    If devices share an engine, each computes its slice for all of their sequences. A layer has two all-reduces.
    """
    size, rate = BYTES[sampler.dtype], (machine.decode_matmul or machine.matmul) * machine.decode_share
    sharing = sampler.sharing
    rounds = max(1.0, work.sequences * sharing / machine.in_flight)
    rows = work.sequences * sharing / rounds
    before = work.prompt + work.response / 2  # tokens before a sampled one, on average
    matrices = shape.layers * shape.products
    weights = product_bytes(sampler) * shape.layers * shape.read(rows) + size * shape.embedding
    read = (weights + cached_bytes(sampler) * rows * shape.cached * before) / sharing
    token = max(2 * (matrices + shape.embedding) * rows / sharing / rate, read / machine.bandwidth)
    token += shape.layers * machine.launch + rows * shape.vocabulary * machine.draw
    token += 4 * shape.layers * (sharing - 1) / sharing * size * rows * shape.hidden / machine.link
    prefill = 2 * matrices * work.prompts * work.prompt
    # A token's queries meet the keys before it, and its probabilities their values.
    decoding = 2 * (matrices + shape.embedding) + 4 * shape.layers * shape.heads * shape.head * before
    return Phase(
        seconds=prefill / rate + rounds * work.response * token,
        operations=decoding * work.sampled + prefill,
        moved=rounds * work.response * read,
    )


def update_phase(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> Phase:
    """Forward and backward over all micro-batches, as if every response had an advantage."""
    # Forward passes of the reference and, for the reward, of the policy: a third of both directions.
    kl = run.reference_kl
    more = 1.0 if kl is None else 1 + (2 if kl.where == "reward" else 1) / 3
    length = work.prompt + work.response
    body = shape.layers * shape.products * work.row * more
    attention = shape.layers * shape.heads * shape.head * work.sequences * length**2 * more
    head = shape.embedding * work.sampled * more
    again = run.training.activation_checkpointing
    products = (8 if again else 6) * body + (9 if again else 7) * attention + 8 * head
    size = BYTES[run.computed_in(machine.gpu)]
    batches = max(1.0, work.row / work.batch)
    kept = batches * activations(shape, work, False)[0]
    traffic = machine.passes * size * (kept + shape.vocabulary * work.sampled)
    # Weights are gathered for each micro-batch's forward and backward. Gradients are scattered once.
    gathered = batches * 3 * size * shape.parameters / machine.link if devices > 1 else 0.0
    return Phase(
        seconds=products / (machine.matmul * machine.train_share) + traffic / machine.bandwidth + gathered,
        operations=6 * (body + attention + head),
        moved=3 * size * shape.parameters,  # weights are read forward and backward, and their gradient is written
    )
