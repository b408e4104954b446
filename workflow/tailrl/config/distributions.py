"""The block of a study that compares engines' whole distributions with the trainer's."""

import math
import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from tailrl.config.base import LARGEST_SEED, MOST_PROBLEMS, MOST_TOKENS, NAME, NAME_RULE, Settings
from tailrl.config.sampler import Disturbance, ExactSettings, SamplerSettings, TransformersSettings, VllmSettings
from tailrl.config.training import TrainerDtype, trainer_dtype
from tailrl.config.vocabulary import Rho
from tailrl.runtime.errors import one_line

HEAD_BELOW, TAIL_FROM = 1.0, 5.0
"""−ln π_train, nats: a distribution's head lies below the first number, its tail from the second on."""

SAMPLED_HEAD_BELOW = -math.log(0.9)
"""The same for the head of the tokens that training sampled, most of which are nearly certain; nats."""


SAME_BITS = (
    "sampler: engine: exact quantises the trainer likewise: there is nothing to compare; engine: vllm quantises its "
    "own side alone"
)


class ComparedEngine(Settings):
    """An engine that samples responses, and whose distribution is compared with the trainer's there."""

    sampler: SamplerSettings = VllmSettings()
    disturbance: Disturbance = Disturbance()
    rescored: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="the noise floor: compare the trainer with itself, in micro-batches of at most so many tokens "
        "(1: each response by itself) against training.token_budget; null: compare with the engine",
    )

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.sampler.verify:
            raise ValueError("sampler.verify draws from the trainer's own distribution: there is nothing to compare")
        if self.sampler.quantizes_trainer:
            raise ValueError(SAME_BITS)
        if self.disturbance.staleness:
            raise ValueError("disturbance.staleness needs earlier steps, which a single policy does not have")
        if self.rescored is not None and self.disturbance != Disturbance():
            raise ValueError("rescored compares the trainer with itself: leave out disturbance")
        if self.rescored is not None and self.sampler.says_routes:
            raise ValueError("rescored compares the trainer with itself: leave out sampler.routes")
        return self


class DistributionSettings(Settings):
    """Engines compared with the trainer over the whole vocabulary, at a share of the positions of sampled responses.

    `training` gives lengths, temperature and the trainer's micro-batches. Responses are sampled from all tokens; each
    side chooses the safe sets from its own logits.
    """

    engines: dict[str, ComparedEngine] = Field(
        {
            "vllm_bf16": ComparedEngine(),
            "vllm_fp16": ComparedEngine(sampler=VllmSettings(dtype="float16")),
            "vllm_fp32": ComparedEngine(sampler=VllmSettings(dtype="float32")),
            "transformers_bf16": ComparedEngine(sampler=TransformersSettings(engine="transformers")),
            "noise_floor": ComparedEngine(rescored=1),
            "exact": ComparedEngine(sampler=ExactSettings(engine="exact", dtype="float32")),
        },
        min_length=1,
        description="one job each",
    )
    responses: int = Field(1000, ge=1, le=MOST_PROBLEMS, description="responses that each engine samples")
    every: int = Field(
        4,
        ge=1,
        le=MOST_TOKENS,
        description="one position in so many is compared; the response's seed chooses the first",
    )
    rho: tuple[Rho, ...] = Field(
        ("e-13", "0.34/V"), min_length=1, description="thresholds of the min-p sets, as an arm's rho is written"
    )
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="seed of the responses")

    @field_validator("engines")
    @classmethod
    def _named(cls, engines: dict[str, ComparedEngine]) -> dict[str, ComparedEngine]:
        for name in engines:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"{one_line(repr(name))} cannot name an engine: {NAME_RULE}")
        return engines


class Distributions(Settings):
    """The settings of the job that compares one engine."""

    name: str
    engine: ComparedEngine
    responses: int
    every: int
    rho: tuple[str, ...]
    seed: int
    temperature: float
    max_new_tokens: int
    token_budget: int
    rollout_timeout: float
    dtype: TrainerDtype

    def decided(self, gpu: bool) -> Self:
        """The settings with the number format that training has on a machine with or without a GPU."""
        return self.model_copy(update={"dtype": trainer_dtype(self.dtype, self.engine.sampler.exact, gpu)})
