"""The block of a study on training: sizes, optimizer, number format, lengths, and when a run ends."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tailrl.config.base import HOTTEST, LARGEST_RATE, LARGEST_RATIO, MOST_RESPONSES, MOST_STEPS, MOST_TOKENS, Settings
from tailrl.config.messages import near
from tailrl.runtime.timeouts import MONTH
from tailrl.tracking.metrics import SIGNALS

Decay = Annotated[float, Field(ge=0, lt=1)]

TrainerDtype = Literal["auto", "float32", "bfloat16"]
"""Number format of the trainer's forward and backward; auto: the machine decides."""


def trainer_dtype(given: TrainerDtype, exact: bool, gpu: bool) -> Literal["float32", "bfloat16"]:
    """The trainer's number format on a machine with or without a GPU; an exact engine's trainer has float32 alone."""
    if given != "auto" and not exact:
        return given
    return "bfloat16" if gpu and not exact else "float32"


class StopRule(Settings):
    """Ends a run at the alarm of a metric, as `tailrl.training.stopping` defines it."""

    metric: str = Field(description="a metric that training logs, or c_skew, the sum of both parts of C(r)")
    factor: float = Field(
        gt=0,
        le=LARGEST_RATIO,
        description="the run ends if the metric's mean over 5 steps is above so many times its mean over the first "
        "tenth of the steps (at least 5); for a factor below 1: if it is below",
    )

    @field_validator("metric")
    @classmethod
    def _logged(cls, metric: str) -> str:
        if metric not in SIGNALS:
            raise ValueError(f"training logs no such metric{near(metric, list(SIGNALS))}")
        return metric

    @field_validator("factor")
    @classmethod
    def _apart(cls, factor: float) -> float:
        if factor == 1:
            raise ValueError("a factor of 1 is the run's own level, which a metric crosses by chance")
        return factor


OPERATIONAL = {"checkpoint_every", "keep_checkpoints", "max_skipped", "rollout_timeout"}
"""Settings that change no number, in any block."""


def without_operational(data: Any) -> Any:
    """Settings as plain data without the operational ones: what a result depends on."""
    if isinstance(data, dict):
        return {key: without_operational(value) for key, value in data.items() if key not in OPERATIONAL}
    return [without_operational(value) for value in data] if isinstance(data, list) else data


def differing(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """The dotted keys in which two blocks of plain data differ, without operational settings."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted((found.keys() | wanted.keys()) - OPERATIONAL):
            yield from differing(found.get(key), wanted.get(key), f"{name}.{key}".lstrip("."))
    elif found != wanted:
        yield name


class Training(Settings):
    """One reinforcement-learning run: sizes, optimizer and lengths."""

    steps: int = Field(100, ge=1, le=MOST_STEPS, description="training steps, each on fresh rollouts")
    prompts: int = Field(8, ge=1, le=MOST_RESPONSES, description="different problems per step")
    group_size: int = Field(8, ge=2, le=MOST_RESPONSES, description="responses per problem (n of RLOO's baseline)")
    backend: Literal["tailrl", "verl"] = Field(
        "tailrl",
        description="what trains: our own loop, or verl in an environment of its own; what verl cannot do is refused",
    )
    verl_overrides: tuple[str, ...] = Field(
        (), description="more lines of verl's command, key=value, which count over those that the arm gives"
    )
    minibatches: int = Field(
        1, ge=1, le=MOST_RESPONSES, description="updates on the rollouts of one step, each on a share of them"
    )
    max_new_tokens: int = Field(64, ge=1, le=MOST_TOKENS, description="longest response, tokens")
    temperature: float = Field(
        1.0, ge=0.01, le=HOTTEST, description="divides the logits of sampler and trainer; vLLM takes 0.01 to 2"
    )
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="sgd: with momentum; its steps shrink with the gradient, AdamW's do not"
    )
    learning_rate: float = Field(1e-4, gt=0, le=LARGEST_RATE, description="the optimizer's rate after warm-up")
    warmup_steps: int = Field(5, ge=0, le=MOST_STEPS, description="steps over which the rate rises linearly")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.99), description="AdamW's decay of the two moments; the first is sgd's momentum"
    )
    weight_decay: float = Field(0.0, ge=0, le=LARGEST_RATE, description="AdamW's decoupled weight decay")
    loss_mean: Literal["all", "kept"] = Field(
        "all",
        description="the responses that the loss is a mean over: all, or only those that the weights keep, so that a "
        "rejection does not shrink the gradient",
    )
    max_grad_norm: float = Field(
        20.0, gt=0, le=LARGEST_RATIO, description="gradients are scaled down to this 2-norm; the loss sums over tokens"
    )
    token_budget: int = Field(
        1024, ge=1, le=MOST_TOKENS, description="most tokens in a packed micro-batch; larger ones exceed a CPU's cache"
    )
    dtype: TrainerDtype = Field(
        "auto",
        description="number format of the trainer's forward and backward; master weights and optimizer are float32; "
        "auto: bfloat16 on a GPU, float32 on a CPU and for an engine with the trainer's own bits. So the same file may "
        "mean different runs on two kinds of machine: run.json has what was used, and a checkpoint of the other is not "
        "continued",
    )
    routing_replay: bool = Field(
        False,
        description="the trainer's forward and backward use the experts that the sampler chose for each token, prompts "
        "included, weighted by the trainer's own router; it needs sampler.routes",
    )
    activation_checkpointing: bool = Field(
        False, description="less memory: keep only each layer's input, and recompute the layer in the backward pass"
    )
    snapshot_every: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="keep the policy of every n-th step, to be evaluated like the last one; null: none",
    )
    keep_tokens_every: int = Field(10, ge=1, le=MOST_STEPS, description="keep the per-token record of every n-th step")
    checkpoint_every: int = Field(
        10,
        ge=1,
        le=MOST_STEPS,
        description="save the run's state after every n-th step; an interruption costs at most n steps",
    )
    keep_checkpoints: int = Field(
        2, ge=1, le=MOST_STEPS, description="how many of the last states are kept until the run ends"
    )
    max_skipped: int = Field(
        3,
        ge=1,
        le=MOST_STEPS,
        description="the run stops after so many steps in a row whose update was skipped for a NaN or Inf",
    )
    stop_when: StopRule | None = Field(
        None, description="ends the run early, at the alarm of a metric; the policy of that step is evaluated"
    )
    rollout_timeout: float = Field(
        3600.0,
        gt=0,
        le=MONTH,
        description="seconds that the engine's start, its self-test, a hand-over of weights or a step's generation may "
        "take; after them the job is ended as hung",
    )

    @property
    def snapshots(self) -> range:
        """The steps after which a snapshot is kept: all but the last, whose policy is the run's result."""
        return range(self.snapshot_every or self.steps, self.steps, self.snapshot_every or self.steps)

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.optimizer == "sgd" and self.weight_decay:
            raise ValueError("optimizer: sgd does not use weight_decay")
        if self.verl_overrides and self.backend != "verl":
            raise ValueError("verl_overrides say nothing without backend: verl")
        for line in self.verl_overrides:
            if "=" not in line and not line.startswith("~"):
                raise ValueError(f"verl_overrides: {line!r} is no line of the form key=value, +key=value or ~key")
        return self
