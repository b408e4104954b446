"""Bytes of one device, by part, while a step runs. P parameters, H wide, V tokens; n devices share the training.

Weights, gradients and optimizer state are exact. Activations are counted from what autograd keeps of a layer, times the
machine's `slack` for the allocator. Engine and trainer share the device, and neither sleeps. vLLM's cache stays
allocated; the other engines free theirs after sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.cpu_chunks import CHUNK_BYTES, CHUNK_ROWS
from tailrl.kernels.logprobs import KEPT_BYTES
from tailrl.planning.machine import Machine
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
VLLM_CPU_CACHE = 2**30
"""The cache that `rollout.vllm` sets on a CPU, bytes."""
GPU_MATRIX_BYTES = GPU_KEPT_BYTES = 2**30
"""The limits of `kernels.cuda_passes`, repeated here because importing it needs Triton."""
PASSING = ("activations", "log-probs")
"""The trainer's parts that exist only during an update."""


def peak(parts: Mapping[str, float], sampler: SamplerSettings, machine: Machine) -> float:
    """Peak bytes of trainer and engine together."""
    update = sum(parts[name] for name in PASSING)
    cache = parts["engine's cache"]
    rest = sum(parts.values()) - update - cache
    return machine.reserve + rest + (update + cache if sampler.engine == "vllm" else max(update, cache))


def training_memory(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> dict[str, float]:
    """Bytes of the trainer, by part."""
    size, parameters = BYTES[run.computed_in(machine.gpu)], shape.parameters
    moments = 2 if run.training.optimizer == "adamw" else 1
    parts = {
        "weights": 4 * parameters / devices,
        "gradients": 4 * parameters / devices,
        "optimizer state": 4 * moments * parameters / devices,
    }
    if devices > 1 or size != 4:
        # The next layer is gathered (or cast) while one computes. The head is gathered whole.
        parts["weights at work"] = size * (2 * shape.layer + shape.embedding)
        parts["gradients at work"] = size * (2 * shape.layer + shape.embedding)
    parts["activations"] = machine.slack * size * activations(shape, work, run.training.activation_checkpointing)
    parts["log-probs"] = logprob_bytes(shape, run, work, machine)
    return parts


def activations(shape: Shape, work: Work, checkpointing: bool) -> float:
    """Numbers that autograd keeps of the largest micro-batch, plus those of the layer that the backward pass is in.

    A layer keeps both residual sums and two numbers of each norm (normed and scaled). It keeps queries, keys, values
    and the attention's output in the padded view, and the output again in the row. The MLP keeps four (gate, its SiLU,
    up, their product). The last norm keeps two. Cosine and sine of the positions are kept once.
    """
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    layer = work.batch * (6 * shape.hidden + queries + 4 * shape.intermediate)
    layer += work.batch_padded * 2 * (queries + keys)
    once = work.batch * 2 * (shape.hidden + shape.head)
    if checkpointing:
        return once + work.batch * shape.hidden * shape.layers + 2 * layer
    return once + (shape.layers + 1) * layer


def logprob_bytes(shape: Shape, run: Run, work: Work, machine: Machine) -> float:
    """Bytes of the logits held at once, of those kept for the backward, and of the head's gradient."""
    tokens = work.batch_sequences * work.response
    pruned = run.vocabulary.rule != "full"
    if machine.gpu:
        kept, size = GPU_KEPT_BYTES, BYTES[run.computed_in(machine.gpu)]
        held = min(GPU_MATRIX_BYTES, size * tokens * shape.vocabulary)
    else:
        kept, size = KEPT_BYTES, 4
        rows = min(CHUNK_ROWS, max(16, CHUNK_BYTES // (4 * shape.vocabulary)), tokens)
        held = 4 * rows * shape.vocabulary
    return held + (kept if pruned else 0) + size * shape.embedding


def engine_memory(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> dict[str, float]:
    """Bytes of the engine on a device, by part. Each device has a whole engine, or a slice of a shared one.

    The cache holds the sequences in flight at full length, unless its size is fixed.
    """
    size = BYTES[sampler.dtype]
    cached = 1 if sampler.kv_cache_dtype.startswith("fp8") else size
    fixed = sampler.engine == "vllm" and not machine.gpu
    sharing = sampler.tensor_parallel
    sequences = min(machine.in_flight, work.sequences * sharing)
    cache = VLLM_CPU_CACHE if fixed else cached * shape.cached * sequences * (work.prompt + work.response) / sharing
    # vLLM gets the head separately from the embedding (`rollout.vllm.engine` says why).
    apart = shape.embedding if shape.tied and sampler.engine == "vllm" else 0
    return {"engine's weights": size * (shape.parameters + apart) / sharing, "engine's cache": cache}


@dataclass(frozen=True, slots=True)
class Placed:
    """Engine and trainer on one device: the memory of each, and how many sequences the engine has in flight."""

    parts: dict[str, float]  # bytes by part, of the trainer and the engine
    machine: Machine  # with as many sequences in flight as its cache has room for
    lacking: float  # bytes that the trainer or the engine lacks; 0 if both fit


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
