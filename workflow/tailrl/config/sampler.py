"""The blocks of an arm for its sampler: the engine, and the disturbance of the engine's distribution."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.base import MOST_NATS, MOST_STEPS, MOST_UNITS, Kinds, Options, Settings
from tailrl.runtime.import_path import FORM

Dtype = Literal["bfloat16", "float16", "float32"]


class SamplerSettings(Kinds):
    """The engine that samples, and its number format. The class of an engine's settings says what the engine can."""

    TOLD_BY: ClassVar = "engine"
    USUAL: ClassVar = "vllm"
    WHOLE_BEFORE: ClassVar = True

    PATH: ClassVar[str] = ""
    """The import path of its class, or of what makes it, of an engine of ours."""
    TRAINERS_BITS: ClassVar[bool] = False
    """Whether its log-probs are the trainer's bit for bit, in the trainer's formats."""
    HOTTEST: ClassVar[float] = math.inf
    """The largest temperature that it samples at."""

    if TYPE_CHECKING:  # the settings of any form

        def __init__(self, **settings: Any) -> None: ...

    engine: str = "vllm"
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        "bfloat16", description="dtype of the engine's weights and activations"
    )
    verify: bool = Field(
        False,
        description="the trainer samples every proposed token again with the same noise, and the engine continues from "
        "the first token that differs: with any engine, samples of the trainer's own policy",
    )

    @property
    def exact(self) -> bool:
        """Whether the log-probs are the trainer's bit for bit, which takes batch-invariant operators."""
        return self.TRAINERS_BITS or self.verify

    @property
    def formats(self) -> "FewBits | None":
        """The settings as those of an engine whose weights, keys and values may have few bits; None for another."""
        return self if isinstance(self, FewBits) else None

    @property
    def quantizes(self) -> bool:
        """Whether weights have few bits."""
        return self.formats is not None and self.formats.quantization is not None

    @property
    def quantized(self) -> bool:
        """Whether weights, or keys and values, have few bits."""
        return self.formats is not None and (self.quantizes or self.formats.kv_cache_dtype != "auto")

    @property
    def quantizes_trainer(self) -> bool:
        """Whether the trainer computes in the engine's few bits too: the matched control of a quantised engine."""
        return self.TRAINERS_BITS and self.quantized

    @property
    def few_bit_trainer(self) -> bool:
        """Whether the trainer computes with the engine's few bits, of a twin or as a remedy."""
        return self.quantizes_trainer or self._setting("quantized_trainer", False)

    @property
    def sharing(self) -> int:
        """Ranks that share one engine."""
        return self._setting("tensor_parallel", 1)

    @property
    def reserved(self) -> float | None:
        """The share of a GPU's memory that the engine takes at its start, and gives away while a trainer works; null:
        it takes what it needs."""
        return self._setting("gpu_memory_utilization", None)

    @property
    def says_routes(self) -> bool:
        """Whether the engine says which experts of a mixture it chose."""
        return self._setting("routes", False)

    def check_temperature(self, key: str, temperature: float) -> None:
        """Raises ValueError, which names the key, for a temperature that the engine refuses once it samples."""
        if temperature > self.HOTTEST:
            raise ValueError(
                f"{key}: {temperature:g} is above {self.HOTTEST:g}, the largest that {self.engine} takes; engine: "
                "transformers and engine: exact sample at any"
            )


class FewBits(SamplerSettings):
    """An engine whose weights, keys and values may have few bits."""

    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="dtype of the cached keys and values; auto: as dtype; fp8 on a CPU needs AVX-512 or AMX; with "
        "exact the trainer's keys and values are rounded likewise",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = Field(
        None,
        description="format of the linear layers, head excepted, made from the trainer's weights at every hand-over; "
        "int8 and fp8 (on a GPU) quantise each token's activations too, int4 computes in dtype; on a CPU int8 needs "
        "VNNI and int4 AVX-512; with exact the trainer computes likewise, so that there is no mismatch",
    )
    group_size: Literal[32, 64, 128] | None = Field(
        None, description="inputs of an int4 weight that share a scale; null: all inputs of an output channel"
    )

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.group_size is not None and self.quantization != "int4":
            raise ValueError("group_size is of int4 weights: say quantization: int4, or leave out group_size")
        return self


class VllmSettings(FewBits):
    """The engine vLLM."""

    PATH: ClassVar = "tailrl.rollout.vllm.engine:make_engine"
    HOTTEST: ClassVar = 2.0  # of vLLM's SamplingParams

    engine: Literal["vllm"] = Field("vllm", description="vLLM")
    dtype: Dtype = Field("bfloat16", description="dtype of the engine's weights and activations")
    gpu_memory_utilization: float = Field(
        0.4,
        gt=0,
        lt=1,
        description="share of a GPU's memory that vLLM takes for weights and cache; beside a trainer it sleeps in the "
        "update, and the trainer's weights and optimizer state lie beside it in the rollout; an evaluation can take "
        "nearly all",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=MOST_UNITS,
        description="ranks that share one vLLM, each with a slice of every weight; it divides the run's ranks; "
        "not with quantization or routes",
    )
    enforce_eager: bool | None = Field(
        None,
        description="whether vLLM runs its model without compiling it; compiling takes half a minute and pays off in "
        "long runs; null: true on a CPU, false on a GPU",
    )
    quantized_trainer: bool = Field(
        False,
        description="the trainer computes with the engine's few bits too, of weights, activations and cached keys and "
        "values, and takes its gradient there (straight-through), as quantisation-aware training does: a remedy, which "
        "leaves the mismatch of rounding",
    )
    routes: bool = Field(
        False,
        description="vLLM says which experts of a mixture it chose for every token, so that flips are counted and "
        "training.routing_replay can use them; it then runs a prompt once for each of its responses",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.quantization == "int4" and self.dtype == "float32":
            raise ValueError("quantization: int4 computes in half precision in vLLM: say dtype: bfloat16 or float16")
        if self.quantized_trainer and not self.quantized:
            raise ValueError("quantized_trainer needs an engine of few bits: set quantization or kv_cache_dtype")
        if self.quantized_trainer and self.verify:
            raise ValueError(
                "verify samples the trainer's own policy, so that no mismatch is left: leave out one of both"
            )
        if self.tensor_parallel > 1 and self.quantization is not None:
            raise ValueError(
                "quantization: ranks that share an engine have slices of a row, whose scales are not the row's: leave "
                "out tensor_parallel"
            )
        if self.tensor_parallel > 1 and self.routes:
            raise ValueError("routes: ranks that share an engine do not say which experts it chose: leave out routes")
        if self.routes and self.verify:
            raise ValueError("routes: vLLM says which experts it chose without verify: leave out routes, or verify")
        return self


class TransformersSettings(SamplerSettings):
    """The Hugging Face library, for machines without vLLM."""

    PATH: ClassVar = "tailrl.rollout.transformers:TransformersSampler"

    engine: Literal["transformers"] = Field(description="the Hugging Face library, for machines without vLLM")


class ExactSettings(FewBits):
    """The trainer's own model, whose log-probs are the trainer's bit for bit."""

    PATH: ClassVar = "tailrl.rollout.exact:ExactSampler"
    TRAINERS_BITS: ClassVar = True

    engine: Literal["exact"] = Field(description="the trainer's own model")
    dtype: Literal["float32"] = Field(description="the trainer's dtype")

    @model_validator(mode="before")
    @classmethod
    def _as_the_trainer(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("dtype") != "float32":
            raise ValueError("engine: exact computes as the trainer does, in float32: say dtype: float32")
        return data

    @model_validator(mode="after")
    def _not_twice(self) -> Self:
        if self.verify:
            raise ValueError("engine: exact draws what the trainer would draw: leave out verify")
        return self


class OwnEngineSettings(SamplerSettings):
    """A class of your own, which has the methods of `tailrl.rollout.Sampler`."""

    engine: str = Field(pattern=FORM, description="the import path of the class, package.module:Class")
    options: Options = Field(default_factory=dict, description="more settings, which the class finds in its settings")


class Disturbance(Settings):
    """A mismatch of known dose between sampler and trainer, one cause a field; all are off by default.

    It adds to the engines' own mismatch. Causes combine, in the order that `tailrl.objective.disturbance` gives.
    """

    staleness: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="age of the engine's weights in steps; the first steps sample with the base policy",
    )
    weights: Literal["float16", "bfloat16", "float8_e4m3"] | None = Field(
        None,
        description="the engine's weights are rounded to this dtype when it receives them; float8_e4m3: matrices only, "
        "each scaled to the dtype's range; null: no rounding",
    )
    bias: float = Field(
        0.0,
        ge=0,
        le=MOST_NATS,
        description="s, nats: each token's logit gets an error from N(0, s^2), the same in every state",
    )
    noise: float = Field(
        0.0,
        ge=0,
        le=MOST_NATS,
        description="sigma, nats: each logit gets an error from N(0, sigma^2), a new one in every state",
    )
    floor: float = Field(0.0, ge=0, lt=1, description="eta: the engine samples from (1 - eta) pi + eta/V")
    side: Literal["sampler", "both"] = Field(
        "sampler",
        description="both: the matched control, whose trainer is disturbed likewise, so that there is no mismatch; "
        "under staleness its gradient is taken at the engine's old weights, with the same delay",
    )

    @model_validator(mode="after")
    def _matched(self) -> Self:
        if self.side == "both" and not (self.on_logits or self.weights or self.staleness):
            raise ValueError("side: both says nothing where no cause is on")
        return self

    @property
    def on_logits(self) -> bool:
        """Whether any cause acts on the logits."""
        return self.bias > 0 or self.noise > 0 or self.floor > 0
