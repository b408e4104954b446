"""What `tailrl probe` may be told: the engine, how it samples, and how much."""

from typing import Self

from pydantic import Field, model_validator

from tailrl.config.base import HOTTEST, LARGEST_SEED, MOST_PROBLEMS, MOST_TOKENS, Settings
from tailrl.config.distributions import SAME_BITS, ComparedEngine, Distributions
from tailrl.config.sampler import SamplerSettings, VllmSettings
from tailrl.config.training import TrainerDtype, Training


class ProbeSettings(Settings):
    """A probe of one model; without a file of its own."""

    sampler: SamplerSettings = VllmSettings()
    trainer_dtype: TrainerDtype = Field(
        "auto", description="number format of the trainer; auto: as training, bfloat16 on a GPU and float32 on a CPU"
    )
    temperature: float = Field(1.0, ge=0.01, le=HOTTEST, description="divides the logits of both sides")
    top_p: float = Field(1.0, gt=0, le=1, description="the engine samples from the fewest tokens with this mass")
    max_new_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="longest response, tokens; null: 64, if there is room"
    )
    samples: int = Field(64, ge=1, le=MOST_PROBLEMS, description="responses; the prompts take turns")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="seed of the responses")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sampler.verify:
            raise ValueError("sampler.verify draws from the trainer's own distribution: there is nothing to compare")
        if self.sampler.quantizes_trainer:
            raise ValueError(SAME_BITS)
        if self.sampler.exact and self.trainer_dtype == "bfloat16":
            raise ValueError("an engine with the trainer's own bits has them in float32 alone: leave out trainer_dtype")
        self.sampler.check_temperature("temperature", self.temperature)
        return self

    def compared(self, max_new_tokens: int) -> Distributions:
        """The engine against the trainer at every position of responses of at most so many tokens."""
        usual = Training()
        return Distributions(
            name="probe",
            engine=ComparedEngine(sampler=self.sampler),
            responses=self.samples,
            every=1,
            rho=("e-13", "0.34/V"),
            seed=self.seed,
            temperature=self.temperature,
            max_new_tokens=max_new_tokens,
            token_budget=usual.token_budget,
            rollout_timeout=usual.rollout_timeout,
            dtype=self.trainer_dtype,
        )
