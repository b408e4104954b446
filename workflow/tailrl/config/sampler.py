"""The blocks of an arm for its sampler: the engine, and the disturbance of the engine's distribution."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from tailrl.config.base import MOST_NATS, MOST_STEPS, MOST_UNITS, Settings

Engine = Literal["vllm", "transformers", "exact"]
"""Rollout engines, each named like its module in `tailrl.rollout`."""

ENGINES: tuple[str, ...] = get_args(Engine)

HOTTEST_VLLM = 2.0
"""The largest temperature that vLLM's SamplingParams accept."""


class SamplerSettings(Settings):
    """The engine that samples, and its number format."""

    engine: Engine = Field(
        "vllm",
        description="the rollout engine; transformers: the Hugging Face library, for machines without vLLM; exact: the "
        "trainer's own model, whose log-probs are the trainer's bit for bit",
    )
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        "bfloat16",
        description="dtype of the engine's weights and activations; exact needs float32, the trainer's dtype; float64 "
        "needs transformers",
    )
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
    routes: bool = Field(
        False,
        description="vLLM says which experts of a mixture it chose for every token, so that flips are counted and "
        "training.routing_replay can use them; it then runs a prompt once for each of its responses",
    )
    verify: bool = Field(
        False,
        description="the trainer samples every proposed token again with the same noise, and the engine continues from "
        "the first token that differs: with any engine, samples of the trainer's own policy",
    )

    @property
    def exact(self) -> bool:
        """Whether the log-probs are the trainer's bit for bit, which takes batch-invariant operators."""
        return self.engine == "exact" or self.verify

    @property
    def quantized(self) -> bool:
        """Whether weights, or keys and values, have few bits."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"

    @property
    def quantizes_trainer(self) -> bool:
        """Whether the trainer computes in the engine's few bits too: the matched control of a quantised engine."""
        return self.engine == "exact" and self.quantized

    def check_temperature(self, key: str, temperature: float) -> None:
        """Raises ValueError, which names the key, for a temperature that the engine refuses once it samples."""
        if self.engine == "vllm" and temperature > HOTTEST_VLLM:
            raise ValueError(
                f"{key}: {temperature:g} is above {HOTTEST_VLLM:g}, the largest that vLLM takes; engine: transformers "
                "and engine: exact sample at any"
            )

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if self.engine == "exact" and self.verify:
            raise ValueError("engine: exact draws what the trainer would draw: leave out verify")
        if self.engine == "exact" and self.dtype != "float32":
            raise ValueError("engine: exact computes as the trainer does, in float32: say dtype: float32")
        if self.dtype == "float64" and self.engine != "transformers":
            raise ValueError(f"engine: {self.engine} does not compute in float64: engine: transformers does")
        if self.group_size is not None and self.quantization != "int4":
            raise ValueError("group_size is of int4 weights: say quantization: int4, or leave out group_size")
        if self.engine == "vllm" and self.quantization == "int4" and self.dtype == "float32":
            raise ValueError("quantization: int4 computes in half precision in vLLM: say dtype: bfloat16 or float16")
        if self.engine == "transformers" and self.quantization is not None:
            raise ValueError("engine: transformers computes in its dtype: leave out quantization")
        if self.engine != "vllm" and self.gpu_memory_utilization != 0.4:
            raise ValueError(f"engine: {self.engine} takes the memory it needs: leave out gpu_memory_utilization")
        if self.engine != "vllm" and self.tensor_parallel != 1:
            raise ValueError(f"engine: {self.engine} is not spread over ranks: leave out tensor_parallel")
        if self.tensor_parallel > 1 and self.quantization is not None:
            raise ValueError(
                "quantization: ranks that share an engine have slices of a row, whose scales are not the row's: leave "
                "out tensor_parallel"
            )
        if self.tensor_parallel > 1 and self.routes:
            raise ValueError("routes: ranks that share an engine do not say which experts it chose: leave out routes")
        if self.routes and (self.engine != "vllm" or self.verify):
            raise ValueError("routes: vLLM says which experts it chose, and without verify: leave out routes")
        if self.engine != "vllm" and self.enforce_eager is not None:
            raise ValueError(f"engine: {self.engine} compiles nothing: leave out enforce_eager")
        if self.engine == "transformers" and self.kv_cache_dtype != "auto":
            raise ValueError("engine: transformers caches keys and values in its own dtype: leave out kv_cache_dtype")
        return self


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
