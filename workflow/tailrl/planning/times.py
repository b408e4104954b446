"""Seconds of one step, by phase, of one device of n: what is counted, over what the machine is stated to do.

Products are counted: six operations a parameter and token for forward and backward, eight where layers are computed
again, and eight a logit's width for the log-probs, whose forward is done again too. What lies between the products is
memory traffic (`Machine.passes`). Sampling goes token by token: the larger of its products' time and of that in which
weights and cache are read, and what a layer costs however little it does.
"""

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.planning.machine import Machine
from tailrl.planning.memory import BYTES, activations
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work


def step_seconds(shape: Shape, run: Run, work: Work, machine: Machine, devices: int = 1) -> dict[str, float]:
    """Seconds by phase."""
    return {
        "rollout": sampling_seconds(shape, run.sampler, work, machine),
        "forward and backward": update_seconds(shape, run, work, machine, devices),
        "optimizer": optimizer_seconds(shape, run, machine, devices),
        "weights": weights_seconds(shape, run, machine, devices),
    }


def sampling_seconds(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> float:
    """All of a device's sequences, as many at a time as its engine has in flight.

    Of an engine that several devices share each computes its slice for the sequences of all of them, and every layer
    adds the slices up twice.
    """
    size, rate = BYTES[sampler.dtype], (machine.decode_matmul or machine.matmul) * machine.decode_share
    sharing = sampler.tensor_parallel
    sequences = work.sequences * sharing
    rounds = max(1.0, sequences / machine.in_flight)
    rows = sequences / rounds
    entries = shape.layers * shape.products + shape.embedding
    middle = work.prompt + work.response / 2
    read = size * (entries + rows * shape.cached * middle) / sharing / machine.bandwidth
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
    attention = (8 if again else 6) * shape.layers * shape.heads * shape.head * work.sequences * length**2
    head = 8 * shape.embedding * work.sampled
    size = BYTES[run.training.dtype]
    batches = max(1.0, work.row / work.batch)
    kept = batches * activations(shape, work, False) * shape.layers / (shape.layers + 1)
    traffic = machine.passes * size * (kept + shape.vocabulary * work.sampled)
    seconds = (body + attention + head) / (machine.matmul * machine.train_share) + traffic / machine.bandwidth
    if devices > 1:
        # Gathered for the forward and for the backward of each micro-batch, gradients scattered once.
        seconds += batches * 3 * size * shape.parameters / machine.link
    return seconds


def optimizer_seconds(shape: Shape, run: Run, machine: Machine, devices: int) -> float:
    """AdamW reads weight, gradient and two moments and writes three of them; the norm reads the gradient once more."""
    moments = 2 if run.training.optimizer == "adamw" else 1
    return 4 * shape.parameters * (4 + 2 * moments) / devices / machine.bandwidth


def weights_seconds(shape: Shape, run: Run, machine: Machine, devices: int) -> float:
    """Read in float32, written in the engine's dtype; gathered first where they are sharded."""
    size = BYTES[run.sampler.dtype]
    gathered = 4 * shape.parameters / machine.link if devices > 1 else 0.0
    return gathered + (4 + size) * shape.parameters / machine.bandwidth
