"""What can differ between the sampler and the trainer of a log, and a log with what was planted in it."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tailrl.diagnosis.log import Log


@dataclass(frozen=True, slots=True)
class Fault:
    """What differs between the sampler and the trainer; by default nothing does.

    Attributes:
        dtype, trainer_dtype: of weights and activations.
        weights: the sampler's weights, rounded: int8, int4 or float8.
        cache: the sampler's keys and values are rounded to float8. flips: the share of tokens whose router errs.
        age: the sampler's weights are so many steps old; `reused`: instead the trainer's are so many steps newer. Where
            the version is logged, ages differ about this one, unless they are `constant`.
        pinned: the engine keeps its first weights, and the trainer's move on by so many steps between parts of the log.
        adapter: the trainer has a random adapter of this size over its weights' spread, and the sampler has not.
        behind: the logged versions are so many steps behind, and the weights are the same.
        flight: the first part of each response is of weights `age` steps old, the rest of the trainer's.
        some: what else differs for a quarter of the responses, which come from another engine.
        last: the last so many numbers of the sampler are those of a model without the prompt.
        settings: options of transformers' own `generate`, with which the sampler samples.
        pruned: both sides renormalise over the sampler's set.
        temperature, trainer_temperature: of either side; raw: the sampler logs log-probs before temperature and mask;
            rescored: its log-probs are the trainer's, packed in a third way.
        rule, threshold: the sampler's truncation, a key of `safe_set.RULES`; banned: the share of tokens that it never
            samples.
        floor: of the dial.
        context: what the trainer sees for the prompt: twice, prefix, other, cut, before, after (see `contexts`).
        mistake: a key of `mistakes.MISTAKES`, of size `by`, in the model of the side `mistaken`.
        shift: the trainer's log-probs are moved by so many tokens. nan, clip, mask: see `spoiled`; at: how much.
        columns: optional columns that are logged.
        engine: vllm: the log is a probe's of the real engine in `dtype`; kv_cache, quantization, group: of its cache
            and its weights.
    """

    dtype: str = "float32"
    trainer_dtype: str = "float32"
    weights: str = ""
    cache: bool = False
    flips: float = 0.0
    age: int = 0
    reused: int = 0
    constant: bool = False
    pinned: int = 0
    adapter: float = 0.0
    behind: int = 0
    flight: bool = False
    some: dict[str, Any] = field(default_factory=dict)
    last: int = 0
    settings: dict[str, float] = field(default_factory=dict)
    pruned: bool = False
    temperature: float = 1.0
    trainer_temperature: float = 1.0
    raw: bool = False
    rescored: bool = False
    rule: str = "full"
    threshold: float = 0.0
    banned: float = 0.0
    floor: float = 0.0
    context: str = ""
    mistake: str = ""
    by: float = 0.0
    mistaken: Literal["sampler", "trainer"] = "trainer"
    shift: int = 0
    nan: str = ""
    clip: str = ""
    at: float = 0.0
    mask: str = ""
    columns: tuple[str, ...] = ()
    engine: str = ""
    kv_cache: str = "auto"
    quantization: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A log with its truth: the planted causes, none for a clean log; `floor`: k3 of the trainer against itself.

    `planted`: the design's names of what was planted, where they say more than the causes. `new`: a mistake inside a
    model of a kind that no settling log has.
    """

    set: str
    model: str
    number: int
    truth: tuple[str, ...]
    fault: dict[str, Any]
    floor: float
    log: Log
    planted: tuple[str, ...] = ()
    new: bool = False
