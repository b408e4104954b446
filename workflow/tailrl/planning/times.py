"""Seconds of one step, by phase, on one of n devices: counted work over the machine's throughput.

Matrix products: six operations a parameter and token for forward and backward, eight with activation checkpointing,
and eight times the width a logit, because the log-probs' forward is done twice. Attention has two products forward and
five backward, which computes its scores again, each over half of all pairs of positions. The rest is memory traffic
(`Machine.passes`). A token's sampling takes the larger of compute time and of the time to read weights and cache, plus
a fixed cost a layer.
"""

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.planning.machine import Machine
from tailrl.planning.memory import BYTES, activations, cached_bytes, engine_weights, product_bytes
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work


def step_seconds(shape: Shape, run: Run, work: Work, machine: Machine, devices: int = 1) -> dict[str, float]:
    """Seconds by phase."""
    # AdamW reads weight, gradient and two moments and writes three of them. The norm reads the gradient once more.
    moments = 2 if run.training.optimizer == "adamw" else 1
    # Weights are read in float32 and written in the engine's dtype. Sharded ones are gathered first.
    gathered = 4 * shape.parameters / machine.link if devices > 1 else 0.0
    return {
        "rollout": sampling_seconds(shape, run.sampler, work, machine),
        "forward and backward": update_seconds(shape, run, work, machine, devices),
        "optimizer": 4 * shape.parameters * (4 + 2 * moments) / devices / machine.bandwidth,
        "weights": gathered + (4 * shape.parameters + engine_weights(shape, run.sampler)) / machine.bandwidth,
    }


def sampling_seconds(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> float:
    """Seconds to sample all of a device's sequences, in rounds of the engine's sequences in flight.

    If devices share an engine, each computes its slice for all of their sequences. A layer has two all-reduces.
    """
    size, rate = BYTES[sampler.dtype], (machine.decode_matmul or machine.matmul) * machine.decode_share
    sharing = sampler.sharing
    sequences = work.sequences * sharing
    rounds = max(1.0, sequences / machine.in_flight)
    rows = sequences / rounds
    entries = shape.layers * shape.products + shape.embedding
    middle = work.prompt + work.response / 2
    read = product_bytes(sampler) * shape.layers * shape.read(rows) + size * shape.embedding
    read = (read + cached_bytes(sampler) * rows * shape.cached * middle) / sharing / machine.bandwidth
    step = max(2 * entries * rows / sharing / rate, read) + shape.layers * machine.launch
    step += rows * shape.vocabulary * machine.draw
    step += 4 * shape.layers * (sharing - 1) / sharing * size * rows * shape.hidden / machine.link
    prefill = 2 * shape.layers * shape.products * work.prompts * work.prompt / rate
    return prefill + rounds * work.response * step


def update_seconds(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> float:
    """Forward and backward over all micro-batches, as if every response had an advantage."""
    again = run.training.activation_checkpointing
    body = (8 if again else 6) * shape.layers * shape.products * work.row
    length = work.prompt + work.response
    attention = (9 if again else 7) * shape.layers * shape.heads * shape.head * work.sequences * length**2
    head = 8 * shape.embedding * work.sampled
    size = BYTES[run.computed_in(machine.gpu)]
    batches = max(1.0, work.row / work.batch)
    kept = batches * activations(shape, work, False)[0]
    traffic = machine.passes * size * (kept + shape.vocabulary * work.sampled)
    if (kl := run.reference_kl) is not None:
        # Forward passes of the reference and, for the reward, of the policy: a third of both directions.
        more = 1 + (2 if kl.where == "reward" else 1) / 3
        body, attention, head = body * more, attention * more, head * more
    seconds = (body + attention + head) / (machine.matmul * machine.train_share) + traffic / machine.bandwidth
    if devices > 1:
        # Weights are gathered for each micro-batch's forward and backward. Gradients are scattered once.
        seconds += batches * 3 * size * shape.parameters / machine.link
    return seconds
