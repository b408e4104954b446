"""The block of a study that compares its arms' gradient estimators with the exact gradient."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.arm import Arm
from tailrl.config.base import LARGEST_SEED, MOST_NATS, MOST_PROBLEMS, MOST_RESPONSES, MOST_TOKENS, MOST_UNITS, Settings

LARGEST = 20_000_000
"""Most numbers (prompts x sequences x tokens x vocabulary) that a tiny model may enumerate: 160 MB in float64."""

NO_MISMATCH = "none"
"""The kind of mismatch without any."""

Nats = Annotated[float, Field(gt=0, le=MOST_NATS)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Doses(Settings):
    """Doses of each kind of mismatch between trainer and sampler; zero mismatch is always measured too."""

    noise: tuple[Nats, ...] = Field(
        (0.01, 0.1, 0.3, 1.0), description="standard deviation of iid Gaussian noise on every logit, nats"
    )
    floor: tuple[Share, ...] = Field(
        (1e-4, 1e-3, 1e-2, 1e-1), description="eta: the sampler draws from (1 - eta) pi + eta / V"
    )
    bias: tuple[Nats, ...] = Field(
        (0.01, 0.1, 0.3, 1.0),
        description="standard deviation of one Gaussian per token, added to its logit in every state, nats",
    )
    rounding: tuple[Share, ...] = Field(
        (), description="step of the grid that logits are rounded to, as a share of the state's largest"
    )


class GradientQuality(Settings):
    """Tiny random models whose responses are all enumerated: an arm's bias and variance are exact sums."""

    models: int = Field(12, ge=1, le=MOST_UNITS, description="random models; medians and ranges over them are reported")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="seed of the models, of the mismatch and of the draws")
    vocabulary_size: int = Field(12, ge=4, le=MOST_UNITS, description="tokens; the last third is a long tail")
    length: int = Field(3, ge=1, le=MOST_TOKENS, description="tokens of every response")
    prompts: int = Field(8, ge=1, le=MOST_RESPONSES, description="different prompts of a model, and of a step")
    group_size: int = Field(8, ge=2, le=MOST_RESPONSES, description="responses per prompt of a step")
    draws: int = Field(
        400,
        ge=2,
        le=MOST_PROBLEMS,
        description="sampled steps for the mean cosine, the only estimate that is not exact",
    )
    doses: Doses = Doses()
    nats: tuple[Nats, ...] = Field(
        (),
        description="divergences per token (k3), nats: compares every kind of mismatch at these in place of doses, "
        "with the dose of each model that has them",
    )

    causes: tuple[Literal["noise", "floor", "bias", "rounding", "old"], ...] = Field(
        ("noise", "floor", "bias", "rounding"),
        min_length=1,
        description="kinds of mismatch that nats compares; old: the sampler has the weights before a step of exact "
        "gradient ascent on the return",
    )

    @model_validator(mode="after")
    def _enumerable(self) -> Self:
        # A power beyond 4^64 is too large whatever it is, and might take for ever.
        responses = self.vocabulary_size ** min(self.length, 64)
        numbers = self.prompts * responses * self.length * self.vocabulary_size
        if numbers > LARGEST:
            raise ValueError(
                f"{self.prompts} prompts with {self.vocabulary_size}^{self.length} responses each are too many to "
                "enumerate; lower vocabulary_size, length or prompts"
            )
        return self


class Gradients(Settings):
    """The settings of the job that measures the estimators."""

    arms: dict[str, Arm]
    quality: GradientQuality
