"""Bytes of one device, by part, while a step runs. P parameters, H wide, V tokens; n devices share the training.

Weights, gradients and optimizer state are exact. What passes is counted at the fullest moment of an update: activations
from what autograd keeps of a layer, times the machine's `slack` for the allocator; buffers as FSDP2 allocates them
(torch 2.13, `_fsdp_collectives.py`: `foreach_all_gather`, `foreach_reduce`). Engine and trainer share the device.
"""

from dataclasses import dataclass

from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.sizes import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    GPU_KEPT_BYTES,
    GPU_LOGITS_AT_ONCE,
    GPU_MATRIX_BYTES,
    KEPT_BYTES,
    LOGITS_AT_ONCE,
)
from tailrl.planning.machine import Machine
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work

Parts = dict[str, tuple[float, float]]
"""Bytes of every part in the two halves of a step: in the rollout, and in the update at its fullest moment."""
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_BYTES = 10 * BYTES["float32"]  # of a logit in a chunk of `kernels.whole_rows`, which holds ten copies
QUANTIZED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # of a linear layer's weight in vLLM, without its scales
SCALE_BYTES = 2  # of a scale of int4; each group of inputs has one
VLLM_CPU_CACHE = 2**30  # bytes of the cache that `rollout.vllm` sets on a CPU


def peak(parts: Parts) -> float:
    """Bytes at the fuller half of a step."""
    rollout = sum(in_rollout for in_rollout, _ in parts.values())
    update = sum(in_update for _, in_update in parts.values())
    return max(rollout, update)


# --- the trainer ---------------------------------------------------------------------------------------------


def trainer_parts(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> Parts:
    """The trainer's parts, and what libraries take."""
    shard = 4 * shape.parameters / devices
    moments = (2 if run.training.optimizer == "adamw" else 1) * shard
    parts: Parts = {
        "libraries": (machine.reserve, machine.reserve),
        "weights": (shard, shard),
        "gradients": (0.0, shard),
        "optimizer state": (moments, moments),
    }
    # From a GPU a reference policy and the sampler's logits go to the host's memory.
    if run.reference_kl and not machine.gpu:
        whole = 4.0 * shape.parameters  # on each rank
        parts["reference policy"] = (whole, whole)
    if run.needs_distributions and not machine.gpu:
        rows = distribution_bytes(shape, work.sampled * devices)  # each rank has those of all ranks
        parts["sampler's logits"] = (rows, rows)
    fullest = max(update_moments(shape, run, work, machine, devices), key=lambda moment: sum(moment.values()))
    return parts | {part: (0.0, size) for part, size in fullest.items()}


def distribution_bytes(shape: Shape, tokens: float) -> float:
    """Bytes of the sampler's whole distribution at so many tokens: float32 logits."""
    return 4 * shape.vocabulary * tokens


def update_moments(
    shape: Shape, run: Run, work: Work, machine: Machine, devices: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Bytes that pass, by part, at the three moments of an update that may be its fullest.

    They are the backward of the log-probs, when every layer keeps its activations; the last layer's backward; and the
    reduction of the embedding's and the head's gradient, when no activation is left.
    """
    size = BYTES[run.computed_in(machine.gpu)]
    sharded = devices > 1 or size != 4
    # Embedding and head (one matrix, if tied) stay whole from the forward to the end of the backward, beside a layer.
    # Several ranks gather into a flat buffer first; its memory belongs to a stream that nothing else takes from.
    whole = size * (shape.root + shape.layer) * (2 if devices > 1 else 1) if sharded else 0.0
    # A gradient is copied to float32 and reduced into a shard, which is added to those of earlier micro-batches. One
    # rank alone divides the copy by 1 into another.
    reduced = 4 * (1 + 1 / devices + (devices == 1)) if sharded else 0.0
    head = size * shape.embedding
    padded = not machine.gpu or size != 2
    numbers = activations(shape, work, run.training.activation_checkpointing, padded)
    kept, layer = (machine.slack * size * number for number in numbers)
    return (
        {
            "weights at work": whole,
            "gradients at work": head,
            "activations": kept,
            "log-probs": logprob_bytes(shape, run, work, machine),
        },
        {
            "weights at work": whole,
            "gradients at work": head + (size + reduced) * shape.layer,
            "activations": kept + layer,
        },
        {"gradients at work": 2 * head + reduced * shape.root},
    )


def activations(shape: Shape, work: Work, checkpointing: bool, padded: bool = True) -> tuple[float, float]:
    """Numbers that autograd keeps of the largest micro-batch, and those besides while the backward is in a layer.

    A layer keeps both residual sums and two numbers of each norm (normed and scaled). It keeps queries, keys, values
    and the attention's output as attention sees them, and the output in the row: padded, or in half precision on a GPU
    (`kernels.varlen`) as the row is, with keys and values repeated for the sequences of a prompt. The MLP keeps four
    (gate, its SiLU, up, their product), those of a mixture for each of a token's experts. The last norm keeps two.
    Cosine and sine of the positions are kept once. A backward needs as many numbers as its layer kept; with activation
    checkpointing these are computed again first.
    """
    queries, keys = shape.heads * shape.head, 2 * shape.kv_heads * shape.head
    # An expert keeps its own copy of a token, and its output; the router its probabilities and weights.
    copies = shape.chosen * (2 * shape.hidden + 2) + 2 * shape.experts if shape.experts else 0
    normed = 2 * (queries + keys // 2) if shape.normed else 0
    layer: float = work.batch * (6 * shape.hidden + queries + normed + 4 * shape.chosen * shape.intermediate + copies)
    layer += work.attended * (2 * queries + keys) if padded else work.batch * queries + work.repeated * keys
    once = work.batch * 2 * (shape.hidden + shape.head)
    if checkpointing:
        return once + work.batch * shape.hidden * shape.layers, 2 * layer
    return once + shape.layers * layer, layer


def logprob_bytes(shape: Shape, run: Run, work: Work, machine: Machine) -> float:
    """Bytes of the log-probs' backward, beside the head's gradient: entries kept, the largest matrices, hidden states.

    On a GPU rows that have no room among the kept entries are computed again, in float32 beside their gradient. Where
    the objective needs the sampler's distribution, a micro-batch's rows of it are there, and a chunk of both.
    """
    tokens, size = work.batch_sampled, BYTES[run.computed_in(machine.gpu)]
    if run.needs_distributions:
        # Where the policy computes in half precision the head is there in float32 too, with its gradient.
        head = 0 if size == 4 else 8 * shape.vocabulary * shape.hidden
        chunk = GPU_LOGITS_AT_ONCE if machine.gpu else LOGITS_AT_ONCE
        return distribution_bytes(shape, tokens) + head + LOGITS_BYTES * chunk
    prunes = run.vocabulary.prunes
    if not machine.gpu:
        rows = min(CHUNK_ROWS, max(16, CHUNK_BYTES // (4 * shape.vocabulary)), tokens)
        return 4 * rows * shape.vocabulary + (KEPT_BYTES if prunes else 0)
    matrix = GPU_MATRIX_BYTES
    logits = min(matrix, 4 * tokens * shape.vocabulary) + min(matrix, size * tokens * shape.vocabulary)
    stretch = min(shape.vocabulary, matrix / (size * tokens))
    # Hidden states of the tokens, a copy of them, and their gradient twice with a product of it, in float32; of a
    # stretch of the vocabulary the weights, their gradient in float32 and as it is returned.
    states = shape.hidden * (tokens * (2 * size + 12) + stretch * (2 * size + 4))
    return logits + states + (GPU_KEPT_BYTES if prunes else 0)


# --- the engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of a device, beside a trainer or alone: a whole one, or a slice of one that devices share."""

    parts: Parts
    in_flight: int  # sequences that the cache has room for
    lacking: float = 0.0  # bytes that the longest sequence lacks


def engine_of(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> Engine:
    """An engine's memory. The cache holds the sequences in flight at their average length, unless its size is fixed.

    On a GPU vLLM has a share of the memory, which must hold the longest sequence. It sleeps while the trainer works,
    and has nothing then (`rollout.vllm.engine.VllmSampler.release`). On a CPU it keeps all. The other engines keep
    their weights.
    """
    weights, sharing = engine_weights(shape, sampler), sampler.sharing
    sequence = cached_bytes(sampler) * shape.cached * (work.prompt + work.response) / sharing
    if sampler.reserved is None:
        cache = sequence * min(machine.in_flight, work.sequences * sharing)
        return Engine({"engine's weights": (weights, weights), "engine's cache": (cache, 0.0)}, machine.in_flight)
    if not machine.gpu:
        fixed = (VLLM_CPU_CACHE, VLLM_CPU_CACHE)
        return Engine({"engine's weights": (weights, weights), "engine's cache": fixed}, machine.in_flight)
    room = sampler.reserved * machine.memory - weights
    longest = sequence * (work.prompt + work.longest) / (work.prompt + work.response)
    return Engine(
        parts={"engine's weights": (weights, 0.0), "engine's cache": (max(room, longest), 0.0)},
        in_flight=max(1, min(machine.in_flight, int(room // sequence))),
        lacking=max(0.0, longest - room),
    )


def engine_weights(shape: Shape, sampler: SamplerSettings) -> float:
    """Bytes of the engine's weights, or of its slice of them, on a device."""
    # vLLM gets a tied head separately from the embedding (`rollout.vllm.engine` says why).
    apart = shape.embedding if shape.tied and sampler.reserved is not None else 0
    return (policy_bytes(shape, sampler) + BYTES[sampler.dtype] * apart) / sampler.sharing


def policy_bytes(shape: Shape, sampler: SamplerSettings) -> float:
    """Bytes of a whole policy in the engine's format, a tied head once."""
    entries = shape.layers * shape.products
    return BYTES[sampler.dtype] * (shape.parameters - entries) + product_bytes(sampler) * entries


def product_bytes(sampler: SamplerSettings) -> float:
    """Bytes of an entry of a linear layer's weight in the engine; scales of whole channels are left out."""
    formats = sampler.formats
    if formats is None or formats.quantization is None or formats.quantizes_trainer:
        return BYTES[sampler.dtype]
    scales = SCALE_BYTES / formats.group_size if formats.group_size else 0.0
    return QUANTIZED_BYTES[formats.quantization] + scales


def cached_bytes(sampler: SamplerSettings) -> int:
    """Bytes of a cached number; an engine that only imitates fp8 keeps its own dtype."""
    formats = sampler.formats
    packs = formats and formats.kv_cache_dtype.startswith("fp8") and not formats.quantizes_trainer
    return 1 if packs else BYTES[sampler.dtype]
