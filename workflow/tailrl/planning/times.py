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
from tailrl.planning.memory import BYTES, activations, cached_bytes, engine_weights, product_bytes
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that a phase computes and moves on one device."""

    operations: float  # floating-point
    moved: float  # bytes to and from the device's memory

    def seconds(self, machine: Machine) -> float:
        """The larger of both at the data sheet's rates."""
        return max(self.operations / machine.matmul, self.moved / machine.bandwidth)


def step_floors(shape: Shape, run: Run, work: Work, machine: Machine, devices: int = 1) -> dict[str, Floor]:
    """Floors of the phases of `step_seconds`, with as many sequences in flight as the machine says."""
    body, attention, head = _update_products(shape, run, work, (6, 6, 6))
    rounds, _, read = _decoding(shape, run.sampler, work, machine)
    matrices = shape.layers * shape.products
    # A token's queries meet the keys before it, and its probabilities their values.
    decoding = 2 * (matrices + shape.embedding) + 4 * shape.layers * shape.heads * shape.head * _middle(work)
    return {
        "rollout": Floor(
            decoding * work.sampled + 2 * matrices * work.prompts * work.prompt, rounds * work.response * read
        ),
        # Weights are read forward and backward, and their gradient is written.
        "forward and backward": Floor(
            body + attention + head, 3 * BYTES[run.computed_in(machine.gpu)] * shape.parameters
        ),
        "optimizer": Floor(0.0, _optimizer_bytes(shape, run, devices)),
        "weights": Floor(0.0, _handover_bytes(shape, run)),
    }


def step_seconds(shape: Shape, run: Run, work: Work, machine: Machine, devices: int = 1) -> dict[str, float]:
    """Seconds by phase."""
    # Sharded weights are gathered first.
    gathered = 4 * shape.parameters / machine.link if devices > 1 else 0.0
    return {
        "rollout": sampling_seconds(shape, run.sampler, work, machine),
        "forward and backward": update_seconds(shape, run, work, machine, devices),
        "optimizer": _optimizer_bytes(shape, run, devices) / machine.bandwidth,
        "weights": gathered + _handover_bytes(shape, run) / machine.bandwidth,
    }


def _optimizer_bytes(shape: Shape, run: Run, devices: int) -> float:
    """AdamW reads weight, gradient and two moments and writes three of them; the norm reads the gradient once more."""
    moments = 2 if run.training.optimizer == "adamw" else 1
    return 4 * shape.parameters * (4 + 2 * moments) / devices


def _handover_bytes(shape: Shape, run: Run) -> float:
    """Weights are read in float32 and written in the engine's format."""
    return 4 * shape.parameters + engine_weights(shape, run.sampler)


def _middle(work: Work) -> float:
    """Tokens before a sampled one, on average."""
    return work.prompt + work.response / 2


def _decoding(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> tuple[float, float, float]:
    """Rounds of the engine, the sequences in flight in each, and the bytes that a device reads for a token of each."""
    sequences = work.sequences * sampler.sharing
    rounds = max(1.0, sequences / machine.in_flight)
    rows = sequences / rounds
    weights = product_bytes(sampler) * shape.layers * shape.read(rows) + BYTES[sampler.dtype] * shape.embedding
    return rounds, rows, (weights + cached_bytes(sampler) * rows * shape.cached * _middle(work)) / sampler.sharing


def _update_products(
    shape: Shape, run: Run, work: Work, each: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Operations of matrices, attention and logits in an update, from those of an entry, of a pair and of a logit."""
    length = work.prompt + work.response
    # Forward passes of the reference and, for the reward, of the policy: a third of both directions.
    kl = run.reference_kl
    more = 1.0 if kl is None else 1 + (2 if kl.where == "reward" else 1) / 3
    body = shape.layers * shape.products * work.row
    attention = shape.layers * shape.heads * shape.head * work.sequences * length**2
    head = shape.embedding * work.sampled
    return each[0] * body * more, each[1] * attention * more, each[2] * head * more


def sampling_seconds(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> float:
    """Seconds to sample all of a device's sequences, in rounds of the engine's sequences in flight.

    If devices share an engine, each computes its slice for all of their sequences. A layer has two all-reduces.
    """
    size, rate = BYTES[sampler.dtype], (machine.decode_matmul or machine.matmul) * machine.decode_share
    sharing = sampler.sharing
    rounds, rows, read = _decoding(shape, sampler, work, machine)
    entries = shape.layers * shape.products + shape.embedding
    step = max(2 * entries * rows / sharing / rate, read / machine.bandwidth) + shape.layers * machine.launch
    step += rows * shape.vocabulary * machine.draw
    step += 4 * shape.layers * (sharing - 1) / sharing * size * rows * shape.hidden / machine.link
    prefill = 2 * shape.layers * shape.products * work.prompts * work.prompt / rate
    return prefill + rounds * work.response * step


def update_seconds(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> float:
    """Forward and backward over all micro-batches, as if every response had an advantage."""
    again = run.training.activation_checkpointing
    products = _update_products(shape, run, work, (8, 9, 8) if again else (6, 7, 8))
    size = BYTES[run.computed_in(machine.gpu)]
    batches = max(1.0, work.row / work.batch)
    kept = batches * activations(shape, work, False)[0]
    traffic = machine.passes * size * (kept + shape.vocabulary * work.sampled)
    seconds = sum(products) / (machine.matmul * machine.train_share) + traffic / machine.bandwidth
    if devices > 1:
        # Weights are gathered for each micro-batch's forward and backward. Gradients are scattered once.
        seconds += batches * 3 * size * shape.parameters / machine.link
    return seconds
