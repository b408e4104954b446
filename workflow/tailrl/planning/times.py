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
from tailrl.planning.memory import BYTES, activations, cached_bytes, policy_bytes, product_bytes
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work


def step_phases(shape: Shape, run: Run, work: Work, machine: Machine, devices: int = 1) -> dict[str, float]:
    """Seconds of each phase of a step, by its name, with as many sequences in flight as the machine says."""
    # AdamW reads weight, gradient and two moments and writes three of them; the norm reads the gradient once more.
    moments = 2 if run.training.optimizer == "adamw" else 1
    stepped = 4 * shape.parameters * (4 + 2 * moments) / devices
    # Sharded weights are gathered, read in float32 and written in the engine's format.
    gathered = 4 * shape.parameters / machine.link if devices > 1 else 0.0
    handed = 4 * shape.parameters + policy_bytes(shape, run.sampler)
    return {
        "rollout": rollout_seconds(shape, run.sampler, work, machine),
        "forward and backward": update_seconds(shape, run, work, machine, devices),
        "optimizer": stepped / machine.bandwidth,
        "weights": gathered + handed / machine.bandwidth,
    }


def rollout_seconds(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> float:
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
    return prefill / rate + rounds * work.response * token


def update_seconds(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> float:
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
    return products / (machine.matmul * machine.train_share) + traffic / machine.bandwidth + gathered
