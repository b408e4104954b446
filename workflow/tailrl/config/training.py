"""The block of a study that says how a run is trained: sizes, optimizer, number format, lengths, and when it ends."""

import difflib
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tailrl.config.base import Settings
from tailrl.runtime.timeouts import MONTH
from tailrl.tracking.alarm import SIGNALS

Decay = Annotated[float, Field(ge=0, lt=1)]


class StopRule(Settings):
    """Ends a run where a metric is beyond a multiple of the run's own level, as `tailrl.tracking.alarm` defines it."""

    metric: str = Field(description="one of the metrics that training logs, or c_skew, the sum of both parts of C(r)")
    factor: float = Field(
        gt=0,
        description="the run ends where the metric's mean over 5 steps is above so many times its mean over the first "
        "tenth of the steps (5 at least), or below it where the factor is below 1",
    )

    @field_validator("metric")
    @classmethod
    def _logged(cls, metric: str) -> str:
        if metric not in SIGNALS:
            near = difflib.get_close_matches(metric, SIGNALS, n=1)
            raise ValueError("training logs no such metric" + (f" (did you mean {near[0]!r}?)" if near else ""))
        return metric

    @field_validator("factor")
    @classmethod
    def _apart(cls, factor: float) -> float:
        if factor == 1:
            raise ValueError("a factor of 1 is the run's own level, which a metric crosses by chance")
        return factor


OPERATIONAL = {"checkpoint_every", "keep_checkpoints", "max_skipped", "rollout_timeout"}
"""Settings that change no number."""


class Training(Settings):
    """One reinforcement-learning run: sizes, optimizer and lengths."""

    steps: int = Field(100, ge=1, description="updates, each on fresh rollouts")
    prompts: int = Field(8, ge=1, description="different problems per step")
    group_size: int = Field(8, ge=2, description="responses per problem (n of RLOO's leave-one-out baseline)")
    minibatches: int = Field(1, ge=1, description="updates on the rollouts of one step, each on a share of them")
    max_new_tokens: int = Field(64, ge=1, description="longest response, tokens")
    temperature: float = Field(
        1.0, ge=0.01, description="divides the logits in the sampler and in the trainer; vLLM goes no lower than 0.01"
    )
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="sgd: with momentum; its steps shrink with the gradient, AdamW's do not"
    )
    learning_rate: float = Field(1e-4, gt=0, description="the optimizer's rate after warm-up")
    warmup_steps: int = Field(5, ge=0, description="steps over which the rate rises linearly")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.99), description="AdamW's decay of the two moments; the first is sgd's momentum"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    loss_mean: Literal["all", "kept"] = Field(
        "all",
        description="what the loss is a mean over: all sampled responses, or those that the weights keep, so that "
        "rejecting the others does not shrink the gradient",
    )
    max_grad_norm: float = Field(
        20.0, gt=0, description="gradients are scaled down to this 2-norm; of a loss that sums over tokens"
    )
    token_budget: int = Field(
        1024, ge=1, description="most tokens in one packed micro-batch; larger ones leave a CPU's cache"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="what the trainer computes in; the weights that the optimizer changes and its state are float32",
    )
    activation_checkpointing: bool = Field(
        False, description="keep only each layer's input, and compute the layer again in the backward pass: less memory"
    )
    snapshot_every: int | None = Field(
        None, ge=1, description="keep the policy of every n-th step too, to be evaluated as the last one is; null: none"
    )
    keep_tokens_every: int = Field(10, ge=1, description="keep the per-token record of every n-th step")
    checkpoint_every: int = Field(
        10, ge=1, description="save the run's state after every n-th step: an interruption costs no more than these"
    )
    keep_checkpoints: int = Field(2, ge=1, description="of these states the last so many are kept until the run ends")
    max_skipped: int = Field(
        3, ge=1, description="steps in a row, their update skipped for a NaN or Inf, after which the run stops"
    )
    stop_when: StopRule | None = Field(
        None, description="ends the run early, at the alarm of a metric; its policy is evaluated as it is then"
    )
    rollout_timeout: float = Field(
        3600.0,
        gt=0,
        le=MONTH,
        description="seconds after which the engine's start, its test, a hand-over of weights or a step's generation "
        "counts as hung and the job is ended",
    )

    @property
    def snapshots(self) -> range:
        """The steps after which the policy is kept, but for the last one, whose policy is the run's."""
        return range(self.snapshot_every or self.steps, self.steps, self.snapshot_every or self.steps)

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.optimizer == "sgd" and self.weight_decay:
            raise ValueError("optimizer: sgd does not use weight_decay")
        return self
