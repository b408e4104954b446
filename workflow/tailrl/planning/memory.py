"""Bytes of one device, by part, while a step runs. P parameters, H wide, V tokens; n devices share the training.

Weights, gradients and optimizer state are exact. What passes is counted at the fullest moment of an update: activations
from what autograd keeps of a layer, times the machine's `slack` for the allocator; buffers as FSDP2 allocates them
(torch 2.13, `_fsdp_collectives.py`: `foreach_all_gather`, `foreach_reduce`). Engine and trainer share the device:
`peak` says which parts are there at once.
"""

from collections.abc import Mapping
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

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_BYTES = 10 * BYTES["float32"]  # of a logit in a chunk of `kernels.whole_rows`, which holds ten copies
QUANTIZED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Of a linear layer's weight in vLLM, without its scales."""
SCALE_BYTES = 2
"""Of a scale of int4; each group of inputs has one."""
VLLM_CPU_CACHE = 2**30
"""The cache that `rollout.vllm` sets on a CPU, bytes."""
PASSING = ("weights at work", "gradients at work", "activations", "log-probs")
"""The trainer's parts that exist only during an update."""


def sleeps(sampler: SamplerSettings, machine: Machine) -> bool:
    """Whether the engine gives all its memory away while the trainer works: vLLM's sleep mode, on a GPU alone.

    `rollout.vllm.engine.VllmSampler.release` does so in every training.
    """
    return machine.gpu and sampler.reserved is not None


def peak(parts: Mapping[str, float], sampler: SamplerSettings, machine: Machine) -> float:
    """Bytes of trainer and engine at the fuller half of a step: the rollout or the update.

    Weights, optimizer state and a reference policy are always there; gradients and what passes in the update alone. A
    sleeping vLLM has nothing then. On a CPU vLLM keeps all its memory, and the other engines their weights. Whole rows
    of the sampler's logits are in the same memory until the step ends; from a GPU they go to the host token by token.
    """
    always = parts["weights"] + parts["optimizer state"] + parts.get("reference policy", 0.0)
    weights, cache = parts["engine's weights"], parts["engine's cache"]
    update = parts["gradients"] + sum(parts.get(name, 0.0) for name in PASSING)
    rows = 0.0 if machine.gpu else parts.get("sampler's logits", 0.0)
    if not sleeps(sampler, machine):
        update += weights + (0.0 if sampler.reserved is None else cache)
    return machine.reserve + always + max(update, weights + cache) + rows


def training_memory(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> dict[str, float]:
    """Bytes of the trainer, by part, at the fullest moment of an update, and of the logits that it gets."""
    parameters = shape.parameters
    moments = 2 if run.training.optimizer == "adamw" else 1
    held = {
        "weights": 4 * parameters / devices,
        "gradients": 4 * parameters / devices,
        "optimizer state": 4 * moments * parameters / devices,
    }
    if run.reference_kl and not machine.gpu:
        held["reference policy"] = 4 * parameters  # whole on each rank; beside a GPU it is in the host's memory
    if run.needs_distributions:
        # A device has those of its own responses; in a machine's memory each rank has those of all ranks.
        held["sampler's logits"] = distribution_bytes(shape, work.sampled * (1 if machine.gpu else devices))
    return held | max(update_moments(shape, run, work, machine, devices), key=lambda parts: sum(parts.values()))


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
    tokens, pruned, size = work.batch_sampled, run.vocabulary.prunes, BYTES[run.computed_in(machine.gpu)]
    if run.needs_distributions:
        # Where the policy computes in half precision the head is there in float32 too, with its gradient.
        head = 0 if size == 4 else 8 * shape.vocabulary * shape.hidden
        return (
            distribution_bytes(shape, tokens)
            + head
            + LOGITS_BYTES * (GPU_LOGITS_AT_ONCE if machine.gpu else LOGITS_AT_ONCE)
        )
    if not machine.gpu:
        rows = min(CHUNK_ROWS, max(16, CHUNK_BYTES // (4 * shape.vocabulary)), tokens)
        return 4 * rows * shape.vocabulary + (KEPT_BYTES if pruned else 0)
    matrix = GPU_MATRIX_BYTES
    logits = min(matrix, 4 * tokens * shape.vocabulary) + min(matrix, size * tokens * shape.vocabulary)
    stretch = min(shape.vocabulary, matrix / (size * tokens))
    # Hidden states of the tokens, a copy of them, and their gradient twice with a product of it, in float32; of a
    # stretch of the vocabulary the weights, their gradient in float32 and as it is returned.
    states = shape.hidden * (tokens * (2 * size + 12) + stretch * (2 * size + 4))
    return logits + states + (GPU_KEPT_BYTES if pruned else 0)


def engine_memory(shape: Shape, sampler: SamplerSettings, work: Work, machine: Machine) -> dict[str, float]:
    """Bytes of the engine on a device, by part. Each device has a whole engine, or a slice of a shared one.

    The cache holds the sequences in flight at their average length, unless its size is fixed.
    """
    cached = cached_bytes(sampler)
    fixed = sampler.reserved is not None and not machine.gpu
    sharing = sampler.sharing
    sequences = min(machine.in_flight, work.sequences * sharing)
    cache = VLLM_CPU_CACHE if fixed else cached * shape.cached * sequences * (work.prompt + work.response) / sharing
    # vLLM gets the head separately from the embedding (`rollout.vllm.engine` says why).
    apart = shape.embedding if shape.tied and sampler.reserved is not None else 0
    weights = engine_weights(shape, sampler) + BYTES[sampler.dtype] * apart
    return {"engine's weights": weights / sharing, "engine's cache": cache}


def engine_weights(shape: Shape, sampler: SamplerSettings) -> float:
    """Bytes of a whole engine's weights, a tied head once; those of linear layers as the format packs them."""
    size, entries = BYTES[sampler.dtype], shape.layers * shape.products
    return size * (shape.parameters - entries) + product_bytes(sampler) * entries


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


@dataclass(frozen=True, slots=True)
class Placed:
    """Engine and trainer on one device: the memory of each, and how many sequences the engine has in flight."""

    parts: dict[str, float]  # bytes by part, of the trainer and the engine
    machine: Machine  # with as many sequences in flight as its cache has room for
    lacking: float  # bytes that the trainer or the engine lacks; 0 if both fit


def place(shape: Shape, run: Run, work: Work, machine: Machine, devices: int) -> Placed:
    """Place a trainer's shard and an engine (or its slice) on one of n devices; the study sets vLLM's share."""
    parts = training_memory(shape, run, work, machine, devices) | engine_memory(shape, run.sampler, work, machine)
    lacking, held = 0.0, machine
    share = run.sampler.reserved
    if machine.gpu and share is not None:
        # vLLM always takes its whole share, which must hold the longest sequence.
        cache = share * machine.memory - parts["engine's weights"]
        held, one = in_flight(shape, run.sampler, share, work, machine)
        lacking, parts["engine's cache"] = one - cache, max(cache, one)
    return Placed(parts, held, max(0.0, lacking, peak(parts, run.sampler, machine) - machine.memory))


def in_flight(
    shape: Shape, sampler: SamplerSettings, share: float, work: Work, machine: Machine
) -> tuple[Machine, float]:
    """The machine with as many sequences as vLLM's share of a GPU holds, and the bytes of one at its longest."""
    engine = engine_memory(shape, sampler, work, machine.model_copy(update={"in_flight": 1}))
    one = engine["engine's cache"]
    room = share * machine.memory - engine["engine's weights"]
    longest = one * (work.prompt + work.most) / (work.prompt + work.response)
    return machine.model_copy(update={"in_flight": max(1, min(machine.in_flight, int(room // one)))}), longest
