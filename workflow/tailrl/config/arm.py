"""The block of an arm, with its correction and clip.

Where jobs run (threads, GPUs, partitions, folders) belongs to Snakemake's profiles and command line.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.base import (
    IMPORTED,
    LARGEST_RATE,
    LARGEST_RATIO,
    MOST_NATS,
    MOST_UNITS,
    Kinds,
    Seeds,
    Settings,
    word_or_import_path,
)
from tailrl.config.presets import expanded, presets
from tailrl.config.reference_kl import ReferenceKL
from tailrl.config.rejection import LOG_STATISTICS, Rejection
from tailrl.config.sampler import Disturbance, SamplerSettings, VllmSettings
from tailrl.config.training import Training
from tailrl.config.vocabulary import FullVocabulary, Vocabulary
from tailrl.runtime.import_path import FORM, is_import_path

THRESHOLDS = {"reject_k1": 1e-3, "reject_k3": 1e-3, "geometric": 1.001, "is": math.inf}
"""Defaults of a sequence weight's threshold other than 2; those of rejections are from arXiv 2605.14220."""


REMEDIES = tuple(sorted(file.stem for file in Path(__file__).parents[1].glob("objective/remedies/[a-z]*.py")))
"""The added sequence weights, each named like its module in `tailrl.objective.remedies`."""

RATIOS = ("is", "tis", "mis", *(name for name in REMEDIES if not name.startswith("reject_")))
"""The sequence weights that are ratios, not 0 or 1; one by import path is one unless its name begins with reject_."""

LIMITED = ("is", "tis", "mis")
"""The sequence weights whose log-ratio `log_ratio_limit` clamps; by the others no ratio is exponentiated."""

if TYPE_CHECKING:
    SequenceWeight = str
    TokenWeight = str
    Estimator = str
    PresetName = str
else:
    PresetName = Literal[tuple(presets())]
    SequenceWeight = word_or_import_path("none", "is", "tis", "mis", "geometric", "reject_k1", "reject_k3", *REMEDIES)
    TokenWeight = word_or_import_path("none", "is", "tis", "mask")
    Estimator = word_or_import_path("rloo", "reinforce", "grpo")


class Correction(Settings):
    """Stop-gradient weights from Δ = log π_train − log π_infer: one per token, times one per sequence; rejections; a
    veto."""

    READS: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        "token": {
            "none": (),
            "is": (),
            "tis": ("token_threshold", "token_lower"),
            "mask": ("token_threshold", "token_lower"),
            IMPORTED: ("token_threshold", "token_lower"),
        },
        "sequence": {
            "none": (),
            "is": (),
            "tis": ("sequence_threshold", "sequence_lower"),
            "mis": ("sequence_threshold", "sequence_lower"),
            "geometric": ("sequence_threshold", "sequence_lower"),
            "reject_k1": ("sequence_threshold", "rejects"),
            "reject_k3": ("sequence_threshold", "rejects"),
            **dict.fromkeys((*REMEDIES, IMPORTED), ("sequence_threshold",)),
        },
        "centering": {"none": (), "full": (), "top_k": ("centering_k",)},
    }
    """The settings that each kind of weight reads, of those that another kind does not."""

    preset: PresetName | None = Field(
        None,
        exclude=True,
        description="a framework's own mode or default, by its name there, such as verl/decoupled_token_is; it stands "
        "for the settings in config/data/presets.yaml, over which those given here count",
    )
    token: TokenWeight = Field(
        "none",
        description="is: exp(Δ_t); tis: min(exp(Δ_t), C); mask (IcePop): exp(Δ_t) where within [1/C, C], else 0; or "
        "the import path of a function of your own",
    )
    token_threshold: float = Field(2.0, gt=1, le=LARGEST_RATIO, description="C of the token weight")
    token_lower: float | None = Field(
        None,
        ge=0,
        le=1,
        description="lower bound of the token weight; null: none for tis, 1/C for mask, of which 0 takes it off",
    )
    sequence: SequenceWeight = Field(
        "none",
        description="is: exp(Δ_y); tis: min(exp(Δ_y), C); mis: exp(Δ_y), but 0 above C; geometric: 1 if exp(mean Δ_t) "
        "is within [1/C, C], else 0; reject_k1, reject_k3: 1 if the sequence's mean of |K1| or K3 is at most C, else "
        "0; or the import path of a function of your own",
    )
    sequence_threshold: float | None = Field(
        None,
        gt=0,
        le=LARGEST_RATIO,
        description="C of the sequence weight; null: 2 (assumed), 0.001 to reject, 1.001 for geometric",
    )
    sequence_lower: float | None = Field(
        None, gt=0, le=1, description="lower bound of tis, mis and geometric; null: none, 1/C for geometric"
    )
    rejects: Literal["r_corr", "r_ppo"] = Field(
        "r_corr",
        description="the ratio that reject_k1 and reject_k3 judge: r_corr = π_train_old/π_rollout_old, the mismatch; "
        "r_ppo = π_θ/π_train_old, the policy's move in earlier updates on the same rollouts",
    )
    reject: tuple[Rejection, ...] = Field((), description="rules that drop tokens or responses; each must be met")
    veto: float | None = Field(
        None, gt=0, lt=1, description="discard a sequence with a token ratio below this; null: no veto"
    )
    veto_above: float | None = Field(
        None, gt=1, le=LARGEST_RATIO, description="discard a sequence with a token ratio above this; null: no such veto"
    )
    normalise: bool = Field(
        False,
        description="divide the weights by their mean over the update's tokens, or responses where these are weighted",
    )
    log_ratio_limit: float | None = Field(
        None,
        gt=0,
        le=MOST_NATS,
        description="nats: clamps to ± this the log-ratios of weights, Δ_t of a token and Δ_y of a response, and log r "
        "of k1, k2 and k3 in `reject`, as verl and SkyRL do at 20; null: nothing is clamped",
    )

    log_ratio_penalty: float | None = Field(
        None,
        gt=0,
        le=LARGEST_RATE,
        description="c: adds c (log π_θ − log π_infer)² of each token to the loss, dropped tokens included, as IPO "
        "does at 0.001; null: no such term",
    )
    centering: Literal["none", "full", "top_k"] = Field(
        "none",
        description="subtract the expected gradient of a sampled token's log-prob under the sampler; full: over all "
        "tokens; top_k: over the sampler's most probable ones, with a tail like the trainer's",
    )
    centering_k: int | None = Field(None, ge=1, le=MOST_UNITS, description="tokens of centering: top_k")

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("preset") is None:
            return data
        settings, others = expanded(data)
        if others:
            raise ValueError(f"preset: {data['preset']} sets an arm's {' and '.join(others)} too, and no arm is here")
        return settings

    @classmethod
    def reads(cls, field: str, kind: str) -> tuple[str, ...]:
        """The settings that a kind of `READS` reads, of those that another kind does not."""
        return cls.READS[field].get(IMPORTED if is_import_path(kind) else kind, ())

    @classmethod
    def unread(cls, field: str, kind: str) -> set[str]:
        """The settings that a kind of `READS` never reads."""
        return set().union(*cls.READS[field].values()) - set(cls.reads(field, kind))

    @model_validator(mode="after")
    def _with_an_effect(self) -> Self:
        for field in self.READS:
            kind = getattr(self, field)
            for name in sorted(self.unread(field, kind)):
                # Settings that a job was given, or recorded, have every field: a default says nothing there.
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{field}: {kind} does not use {name}")
        if self.centering == "top_k" and self.centering_k is None:
            raise ValueError("centering: top_k needs centering_k")
        return self

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if self.sequence == "geometric" and self.limit <= 1:
            raise ValueError("sequence: geometric keeps ratios within [1/C, C]: sequence_threshold must exceed 1")
        if self.sequence_lower is not None and self.sequence_lower >= self.limit:
            raise ValueError(f"sequence_lower must be less than C, {self.limit:g}")
        clamps = self.token != "none" or self.sequence in LIMITED
        if self.log_ratio_limit and not (clamps or any(rule.of in LOG_STATISTICS for rule in self.reject)):
            raise ValueError(
                "log_ratio_limit clamps the log-ratios of weights, k1, k2 and k3, and there is none of these"
            )
        others = {"sequence": self.sequence != "none", "reject": self.reject, "veto": self.veto}
        beside = [name for name, value in (others | {"veto_above": self.veto_above}).items() if value]
        if self.centering != "none" and beside:
            raise ValueError(
                f"centering subtracts the expectation of a token's own term, of which {beside[0]} is no part: a drift "
                "would stay; leave out one of them"
            )
        if self.log_ratio_penalty and self.centering != "none":
            raise ValueError("log_ratio_penalty pulls the policy to the sampler's, a pull that centering subtracts")
        if self.log_ratio_penalty and self.normalise:
            raise ValueError("normalise rescales the whole gradient, and the term of log_ratio_penalty with it")
        if self.normalise and not self.ratio:
            raise ValueError("normalise divides by the mean of the weights by the ratio, and there is no such weight")
        return self

    @property
    def sequence_bounded(self) -> bool:
        """Whether the sequence weight has a C."""
        return "sequence_threshold" in self.reads("sequence", self.sequence)

    @property
    def limit(self) -> float:
        """C of the sequence weight, or its default."""
        return THRESHOLDS.get(self.sequence, 2.0) if self.sequence_threshold is None else self.sequence_threshold

    @property
    def weighted(self) -> bool:
        """Whether any weight or rejection (not only a veto) is in use."""
        return self.token != "none" or self.sequence != "none" or bool(self.reject)

    @property
    def vetoes(self) -> bool:
        """Whether a single token's ratio discards a response."""
        return self.veto is not None or self.veto_above is not None

    @property
    def sequence_ratio(self) -> bool:
        """Whether the sequence weight is a probability ratio, not only 0 or 1."""
        if is_import_path(self.sequence):
            return not self.sequence.rpartition(":")[2].startswith("reject_")
        return self.sequence in RATIOS

    @property
    def ratio(self) -> bool:
        """Whether a weight is a probability ratio, not only 0 or 1."""
        return self.token != "none" or self.sequence_ratio

    @property
    def judges_batch(self) -> bool:
        """Whether a rejection looks at all tokens of an update, which are scored before it then."""
        return any(rule.by == "batch" for rule in self.reject)

    @property
    def judges_moves(self) -> bool:
        """Whether a rejection judges r_ppo alone, which is 1 in the first update on a step's rollouts."""
        return self.rejects == "r_ppo" or any(rule.ratio == "r_ppo" for rule in self.reject)


class Clip(Kinds):
    """A loss of the ratio in place of the plain log-prob, PPO's clipped ratio and its relatives, for several updates on
    the same rollouts."""

    TOLD_BY: ClassVar = "loss"
    USUAL: ClassVar = "ppo"
    WHOLE_BEFORE: ClassVar = True

    if TYPE_CHECKING:  # the settings of any form

        def __init__(self, **settings: Any) -> None: ...

    loss: str = "ppo"
    ratio: Literal["recompute", "bypass", "decoupled"] = Field(
        description="recompute: π_θ/π_train_old; bypass: π_θ/π_rollout_old; decoupled: recompute, times the "
        "stop-gradient π_train_old/π_rollout_old of the token"
    )
    proximal: Literal["recompute", "loglinear"] = Field(
        "recompute",
        description="π_train_old: recompute, scored by the trainer; loglinear (A-3PO), between the sampler's log-prob "
        "and the policy's by the age of the engine's weights, (age - 1)/age of the way",
    )

    @model_validator(mode="after")
    def _one_old_policy(self) -> Self:
        if self.proximal == "loglinear" and self.ratio == "bypass":
            raise ValueError("proximal: loglinear stands for π_train_old, which ratio: bypass does not use")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """How far below and above 1 a ratio may be."""
        return self._setting("low", 1.0), self._setting("high", math.inf)

    @property
    def limit(self) -> float | None:
        """Nats to which log-ratios are clamped; None: they are not."""
        return self._setting("log_ratio_limit", None)

    @property
    def dual_bound(self) -> float | None:
        """The largest ratio where the advantage is negative; None: any."""
        return self._setting("dual", None)


class Bounded(Clip):
    """A ratio within bounds."""

    low: float = Field(0.2, gt=0, lt=1, description="ratios below 1 - low get no gradient if the advantage is < 0")
    high: float = Field(
        0.2, gt=0, le=LARGEST_RATIO, description="ratios above 1 + high get no gradient if the advantage is > 0"
    )


class Limited(Clip):
    """A log-ratio that may be clamped."""

    log_ratio_limit: float | None = Field(
        None,
        gt=0,
        le=MOST_NATS,
        description="nats: clamps log r to ± this, without gradient beyond it, as verl and SkyRL do at 20; gspo: the "
        "mean of log r, from above alone; vespo: each token's, before their sum; null: nothing is clamped",
    )


class Dual(Bounded, Limited):
    """A ratio that may also be bounded where the advantage is negative."""

    dual: float | None = Field(
        None,
        gt=1,
        le=LARGEST_RATIO,
        description="dual clip: ratios above this get no gradient if the advantage is < 0; null: no bound there",
    )


class Ppo(Dual):
    """PPO's clipped ratio."""

    loss: Literal["ppo"] = Field("ppo", description="min(r A, clip(r) A)")


class Free(Limited):
    """The ratio without a clip."""

    loss: Literal["free"] = Field(description="r A")


class Gspo(Bounded, Limited):
    """PPO's term with the geometric mean of a response's ratios."""

    loss: Literal["gspo"] = Field(description="ppo with the geometric mean of a response's ratios")


class Cispo(Bounded):
    """A clipped ratio as a weight, without gradient."""

    loss: Literal["cispo"] = Field(description="stopped clip(r) times A log-prob")


class Sapo(Limited):
    """A soft gate in place of the clip."""

    loss: Literal["sapo"] = Field(description="a sigmoid of r, times A")


class Vespo(Limited):
    """A weight of the whole response's ratio."""

    loss: Literal["vespo"] = Field(description="a stopped weight of a response's ratio, times A log-prob")

    @model_validator(mode="after")
    def _once(self) -> Self:
        if self.ratio == "decoupled":
            raise ValueError("loss: vespo with ratio: bypass weighs by the whole ratio; decoupled would do so twice")
        return self


class OwnLoss(Dual):
    """A loss of the user's own."""

    loss: str = Field(pattern=FORM, description="the import path of a function of RatioTokens")


class ArmBlocks(Settings):
    """The blocks that say how an arm trains."""

    estimator: Estimator
    clip: Clip | None
    reference_kl: ReferenceKL | None
    vocabulary: Vocabulary
    correction: Correction
    sampler: SamplerSettings
    disturbance: Disturbance


class Arm(ArmBlocks):
    """One way to train."""

    estimator: Estimator = Field(
        "rloo", description="how rewards become advantages; also the import path of a function of your own"
    )
    clip: Clip | None = Field(None, description="PPO's clipped ratio; null: the plain policy gradient")
    reference_kl: ReferenceKL | None = Field(None, description="a penalty for leaving the base policy; null: none")
    vocabulary: Vocabulary = FullVocabulary()
    correction: Correction = Correction()
    sampler: SamplerSettings = VllmSettings()
    disturbance: Disturbance = Disturbance()
    training: dict[str, Any] = Field(default_factory=dict, description="training settings of this arm alone")
    seeds: Seeds | None = Field(None, description="the seeds of this arm's runs; null: the study's")
    deliberate: bool = Field(False, description="accept an arm that is biased by construction")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        given = data.get("correction") if isinstance(data, Mapping) else None
        if not isinstance(given, Mapping):
            return data
        settings, others = expanded(given)
        if "vocabulary" in others:  # a framework replays the sampler's set, and the arm says by which rule it samples
            chosen = data.get("vocabulary")
            if isinstance(chosen, Mapping):
                others["vocabulary"] = {"side": others["vocabulary"]["side"], **chosen}
            data = {name: value for name, value in data.items() if name != "vocabulary"}
        if twice := [name for name in others if data.get(name) is not None]:
            raise ValueError(f"correction.preset: {given['preset']} sets {twice[0]}: leave it out, or the preset")
        return {**data, "correction": settings, **others} if others else data

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.vocabulary.outside == "paper_fill" and (
            self.correction.weighted or self.correction.vetoes or self.clip
        ):
            raise ValueError(
                "vocabulary.outside: paper_fill has no effect beside a correction, a veto or a clipped ratio, "
                "which give a sequence with an outside token weight 0"
            )
        if self.clip and self.clip.ratio != "recompute" and self.correction.ratio:
            raise ValueError(
                f"clip.ratio: {self.clip.ratio} already divides by the sampler's probability; a weight by the ratio "
                "would do so twice"
            )
        if self.reference_kl and self.reference_kl.biased and not self.deliberate:
            raise ValueError(f"reference_kl: {self.reference_kl.biased}; use another estimator or say deliberate: true")
        if self.reference_kl and self.reference_kl.where == "loss" and self.correction.normalise:
            raise ValueError("correction.normalise rescales the whole gradient, and a reference_kl in the loss with it")
        if self.correction.token != "none" and self.correction.sequence_ratio and not self.deliberate:
            raise ValueError(
                f"correction: token: {self.correction.token} and sequence: {self.correction.sequence} both weigh by "
                "the ratio, which counts the mismatch twice; use one of them, or say deliberate: true"
            )
        if self.disturbance.weights == self.sampler.dtype and self.disturbance.side == "sampler":
            raise ValueError(
                f"disturbance.weights: {self.sampler.dtype} has no effect beside sampler.dtype: {self.sampler.dtype}, "
                "in which the engine holds its weights anyway"
            )
        whole = self.vocabulary.side == "replay" or self.correction.centering != "none"
        if whole and (self.sampler.verify or (self.disturbance.side == "both" and self.disturbance.on_logits)):
            raise ValueError("vocabulary.side: replay and correction.centering need a mismatch, which this arm has not")
        if self.clip and self.correction.centering != "none":
            raise ValueError("correction.centering is of the plain policy gradient: leave out clip")
        if self.vocabulary.side in ("sampler", "trainer") and not self.deliberate:
            raise ValueError(
                f"vocabulary.side: {self.vocabulary.side} samples from one distribution and trains another, which "
                "multiplies every ratio by the kept mass; prune on both sides, or say deliberate: true"
            )
        return self

    def check(self, training: Training) -> None:
        """Raises ValueError if the arm does not fit its training settings, the study's with its own overrides."""
        self.sampler.check_temperature("training.temperature", training.temperature)
        if training.routing_replay and not self.sampler.says_routes:
            raise ValueError(
                "training.routing_replay needs the experts that the sampler chose, which vLLM alone gives: set "
                "sampler.routes: true, or leave it out"
            )
        several = training.minibatches > 1
        if training.minibatches > training.prompts * training.group_size:
            raise ValueError("more minibatches than responses a step")
        if self.correction.log_ratio_penalty and training.loss_mean == "kept":
            raise ValueError(
                "training.loss_mean: kept rescales the whole gradient, and the term of correction.log_ratio_penalty "
                "with it: set loss_mean: all"
            )
        if several and self.clip is None and not (self.correction.ratio or self.deliberate):
            raise ValueError(
                f"with {training.minibatches} minibatches all but the first train on responses of an older policy; add "
                "clip or a weight by the ratio, or say deliberate: true"
            )
        if several and self.correction.centering != "none":
            raise ValueError(
                "correction.centering is of the policy that the rollouts were scored by: set minibatches: 1"
            )
        if self.reference_kl and self.reference_kl.where == "loss" and training.loss_mean == "kept":
            raise ValueError(
                "training.loss_mean: kept rescales the whole gradient, and a reference_kl in the loss with it: put it "
                "in the reward, or set loss_mean: all"
            )
        if self.clip and self.clip.proximal == "loglinear" and self.disturbance.staleness < 2:
            raise ValueError(
                "clip.proximal: loglinear gives the sampler's own log-probs at an age below 2: set "
                "disturbance.staleness, or ratio: bypass"
            )
        scored_before = several and self.clip is not None and self.clip.ratio != "bypass"
        if self.correction.normalise and training.loss_mean == "kept":
            raise ValueError("correction.normalise and training.loss_mean: kept each rescale the mean: use one of them")
        if self.correction.judges_moves and not scored_before:
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
