"""The block of an arm, with its correction and clip.

Where jobs run (threads, GPUs, partitions, folders) belongs to Snakemake's profiles and command line.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.base import Seeds, Settings
from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.config.training import Training
from tailrl.config.vocabulary import Vocabulary

THRESHOLDS = {"reject_k1": 1e-3, "reject_k3": 1e-3, "geometric": 1.001, "is": math.inf}
"""Defaults of a sequence weight's threshold other than 2; those of rejections are from arXiv 2605.14220."""


REMEDIES = tuple(sorted(file.stem for file in Path(__file__).parents[1].glob("objective/remedies/[a-z]*.py")))
"""The added sequence weights, each named like its module in `tailrl.objective.remedies`."""

if TYPE_CHECKING:
    SequenceWeight = str
else:
    SequenceWeight = Literal[("none", "is", "tis", "mis", "geometric", "reject_k1", "reject_k3", *REMEDIES)]


class Correction(Settings):
    """Stop-gradient weights from Δ = log π_train − log π_infer: one per token, times one per sequence, and a veto."""

    token: Literal["none", "tis", "mask"] = Field(
        "none", description="tis: min(exp(Δ_t), C); mask: exp(Δ_t) where within [1/C, C], else 0"
    )
    token_threshold: float = Field(2.0, gt=1, description="C of the token weight")
    sequence: SequenceWeight = Field(
        "none",
        description="is: exp(Δ_y); tis: min(exp(Δ_y), C); mis: exp(Δ_y), but 0 above C; geometric: 1 if exp(mean Δ_t) "
        "is within [1/C, C], else 0; reject_k1, reject_k3: 1 if the sequence's mean of |K1| or K3 is at most C, else 0",
    )
    sequence_threshold: float | None = Field(
        None, gt=0, description="C of the sequence weight; null: 2 (assumed), 0.001 to reject, 1.001 for geometric"
    )
    rejects: Literal["r_corr", "r_ppo"] = Field(
        "r_corr",
        description="the ratio that reject_k1 and reject_k3 judge: r_corr = π_train_old/π_rollout_old, the mismatch; "
        "r_ppo = π_θ/π_train_old, the policy's move in earlier updates on the same rollouts",
    )
    veto: float | None = Field(
        None, gt=0, lt=1, description="discard a sequence with a token ratio below this; null: no veto"
    )

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if self.sequence == "geometric" and self.limit <= 1:
            raise ValueError("sequence: geometric keeps ratios within [1/C, C]: sequence_threshold must exceed 1")
        if self.sequence in ("none", "is") and self.sequence_threshold is not None:
            raise ValueError(f"sequence: {self.sequence} does not use sequence_threshold")
        if self.rejects == "r_ppo" and self.sequence not in ("reject_k1", "reject_k3"):
            raise ValueError(f"rejects: r_ppo is for reject_k1 and reject_k3, and not for sequence: {self.sequence}")
        return self

    @property
    def limit(self) -> float:
        """C of the sequence weight, or its default."""
        return THRESHOLDS.get(self.sequence, 2.0) if self.sequence_threshold is None else self.sequence_threshold

    @property
    def weighted(self) -> bool:
        """Whether any weight (not only a veto) is in use."""
        return self.token != "none" or self.sequence != "none"

    @property
    def ratio(self) -> bool:
        """Whether a weight is a probability ratio, not only 0 or 1."""
        ratios = {"is", "tis", "mis", *(name for name in REMEDIES if not name.startswith("reject_"))}
        return self.token != "none" or self.sequence in ratios


class Clip(Settings):
    """PPO's clipped ratio in place of the plain log-prob, for several updates on the same rollouts."""

    ratio: Literal["recompute", "bypass", "decoupled"] = Field(
        description="recompute: π_θ/π_train_old; bypass: π_θ/π_rollout_old; decoupled: recompute, times the "
        "stop-gradient π_train_old/π_rollout_old of the token"
    )
    low: float = Field(0.2, gt=0, lt=1, description="ratios below 1 - low get no gradient if the advantage is < 0")
    high: float = Field(0.2, gt=0, description="ratios above 1 + high get no gradient if the advantage is > 0")


class Arm(Settings):
    """One way to train."""

    estimator: Literal["rloo", "reinforce", "grpo"] = Field("rloo", description="how rewards become advantages")
    clip: Clip | None = Field(None, description="PPO's clipped ratio; null: the plain policy gradient")
    vocabulary: Vocabulary = Vocabulary()
    correction: Correction = Correction()
    sampler: SamplerSettings = SamplerSettings()
    disturbance: Disturbance = Disturbance()
    training: dict[str, Any] = Field(default_factory=dict, description="training settings of this arm alone")
    seeds: Seeds | None = Field(None, description="the seeds of this arm's runs; null: the study's")
    deliberate: bool = Field(False, description="accept an arm that is biased by construction")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.vocabulary.outside == "paper_fill" and (self.correction.weighted or self.correction.veto or self.clip):
            raise ValueError(
                "vocabulary.outside: paper_fill has no effect beside a correction, a veto or a clipped ratio, "
                "which give a sequence with an outside token weight 0"
            )
        if self.clip and self.clip.ratio != "recompute" and self.correction.ratio:
            raise ValueError(
                f"clip.ratio: {self.clip.ratio} already divides by the sampler's probability; a weight by the ratio "
                "would do so twice"
            )
        if self.disturbance.weights == self.sampler.dtype and self.disturbance.side == "sampler":
            raise ValueError(
                f"disturbance.weights: {self.sampler.dtype} has no effect beside sampler.dtype: {self.sampler.dtype}, "
                "in which the engine holds its weights anyway"
            )
        if self.vocabulary.side != "both" and not self.deliberate:
            raise ValueError(
                f"vocabulary.side: {self.vocabulary.side} samples from one distribution and trains another, which "
                "multiplies every ratio by the kept mass; prune on both sides, or say deliberate: true"
            )
        return self

    def check(self, training: Training) -> None:
        """Raises ValueError if the arm does not fit its training settings, the study's with its own overrides."""
        self.sampler.check_temperature("training.temperature", training.temperature)
        several = training.minibatches > 1
        if training.minibatches > training.prompts * training.group_size:
            raise ValueError("more minibatches than responses a step")
        if several and self.clip is None and not (self.correction.ratio or self.deliberate):
            raise ValueError(
                f"with {training.minibatches} minibatches all but the first train on responses of an older policy; add "
                "clip or a weight by the ratio, or say deliberate: true"
            )
        scored_before = several and self.clip is not None and self.clip.ratio != "bypass"
        if self.correction.rejects == "r_ppo" and not scored_before:
            raise ValueError(
                "correction.rejects: r_ppo is 1 in the first update on a step's rollouts; it needs "
                "training.minibatches above 1 and clip.ratio: recompute or decoupled"
            )
        if several and self.disturbance.staleness and self.disturbance.side == "both":
            raise ValueError(
                "with disturbance.side: both, staleness takes one gradient a step, at the engine's old weights; set "
                "minibatches: 1"
            )
        if self.sampler.exact and training.dtype == "bfloat16":
            raise ValueError(
                "an engine with the trainer's own bits has them in float32 alone; set training.dtype: float32, or "
                "sample with another engine and without verify"
            )
