"""The block of an arm on its safe set: the rule, its threshold, and which side prunes."""

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tailrl.config.base import MOST_TOKENS, MOST_UNITS, Kinds, Text

_RHO = re.compile(r"^(e-?\d+(\.\d+)?|\d+(\.\d+)?(e-?\d+)?(/V)?)$")


def log_rho(rho: str, vocabulary_size: int) -> float:
    """ln ρ (natural log) of a threshold written as `e-13` (that is e⁻¹³), `1e-6` or `0.34/V`."""
    if rho.startswith("e"):
        return float(rho[1:])
    number, _, per_vocabulary = rho.partition("/")
    value = float(number) / (vocabulary_size if per_vocabulary else 1)
    return math.log(value) if value > 0 else -math.inf


def _in_range(rho: str) -> str:
    if not _RHO.fullmatch(rho) or not -math.inf < log_rho(rho, 1000) <= 0:
        raise ValueError("write e-13, 1e-6 or 0.34/V, with a value in (0, 1]")
    return rho


Rho = Annotated[Text, AfterValidator(_in_range)]
"""A threshold, as text."""


class Vocabulary(Kinds):
    """The safe set's rule, which the sampler and the trainer each apply to their own logits.

    `Vocabulary(rule="min_p", rho="e-13")` is a `MinP`.
    """

    TOLD_BY: ClassVar = "rule"
    USUAL: ClassVar = "full"
    WHOLE_BEFORE: ClassVar = True

    if TYPE_CHECKING:  # the settings of any form

        def __init__(self, **settings: Any) -> None: ...

    rule: str = "full"
    side: Literal["both", "sampler", "trainer", "replay"] = Field(
        "both",
        description="which side prunes; one side alone is biased; replay: the sampler prunes, and the trainer "
        "renormalises over the sampler's set",
    )
    outside: Literal["drop", "paper_fill"] = Field(
        "drop",
        description="a sampled token outside the trainer's set, if no ratio is used: drop removes its term, "
        "paper_fill scores it with the paper's log-prob of -50",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.side == "replay" and self.outside != "drop":
            raise ValueError("outside says nothing with side: replay, whose set every sampled token is in")
        if self.side == "sampler" and self.outside != "drop":
            raise ValueError("outside says nothing with side: sampler, whose trainer prunes nothing")
        return self

    @property
    def prunes(self) -> bool:
        """Whether the rule leaves out any token."""
        return self.rule != "full"

    @property
    def trainer_rule(self) -> str:
        """The rule by which the trainer prunes its own logits; full where it does not, or takes the sampler's set."""
        return self.rule if self.side in ("both", "trainer") else "full"

    @property
    def sampler_rule(self) -> str:
        """The rule by which the sampler prunes."""
        return "full" if self.side == "trainer" else self.rule

    @property
    def rhos(self) -> tuple[str, ...]:
        """The thresholds that are shares of a probability, as they are written."""
        return ()

    @property
    def target(self) -> float | None:
        """The lost mass of a response to which the threshold moves in training; None: it does not."""
        return self._setting("budget", None)

    @property
    def easy(self) -> str | None:
        """The threshold of a prompt that is always solved; None: all prompts have one threshold."""
        return self._setting("rho_easy", None)

    @property
    def adapts(self) -> bool:
        """Whether the threshold moves in training."""
        return self.target is not None or self.easy is not None

    def threshold(self, vocabulary_size: int) -> float:  # noqa: ARG002
        """The rule's number: ln ρ, k or p; 0 for the full vocabulary."""
        return 0.0


class FullVocabulary(Vocabulary):
    """All tokens."""

    rule: Literal["full"] = Field("full", description="all tokens")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.outside != "drop" or self.side != "both":
            raise ValueError("outside and side say nothing with rule: full (nothing is pruned)")
        return self


class ByRho(Vocabulary):
    """Tokens with at least rho times a probability, where rho may adapt."""

    rho: Rho = Field(description="threshold of min_p and entropy, as text: e-13 (= exp(-13)), 1e-6 or 0.34/V")
    adapt: Literal["none", "budget", "difficulty"] = Field(
        "none",
        description="budget: after every step, ln rho moves so that a response loses `budget` of mass; difficulty: rho "
        "depends on the prompt, from rho (never solved) to rho_easy (always solved)",
    )
    budget: float | None = Field(
        None, gt=0, le=MOST_TOKENS, description="target of E[sum_t (1 - Z_t)], the bias bound of Prop. 5.5"
    )
    rho_easy: Rho | None = Field(None, description="threshold of a prompt that is always solved, written as rho")

    @model_validator(mode="after")
    def _adapted(self) -> Self:
        needed = {"none": "", "budget": "budget", "difficulty": "rho_easy"}[self.adapt]
        for name, value in (("budget", self.budget), ("rho_easy", self.rho_easy)):
            if name == needed and value is None:
                raise ValueError(f"adapt: {self.adapt} needs {name}")
            if name != needed and value is not None:
                raise ValueError(f"adapt: {self.adapt} does not use {name}")
        if self.adapt == "budget" and self.side == "sampler":
            raise ValueError("adapt: budget is measured in the trainer, which side: sampler leaves unpruned")
        return self

    @property
    def rhos(self) -> tuple[str, ...]:
        """rho, and where it adapts to the difficulty rho_easy."""
        return (self.rho,) if self.rho_easy is None else (self.rho, self.rho_easy)

    def threshold(self, vocabulary_size: int) -> float:
        """The ln ρ that training starts from."""
        return log_rho(self.rho, vocabulary_size)


class MinP(ByRho):
    """Tokens with at least rho times the largest probability."""

    rule: Literal["min_p"] = Field(description="tokens with at least rho times the largest probability")


class Entropy(ByRho):
    """Tokens with at least rho times exp(-entropy), a typical token's probability."""

    rule: Literal["entropy"] = Field(description="tokens with at least rho times exp(-entropy)")


class TopK(Vocabulary):
    """The k most probable tokens, for comparison."""

    rule: Literal["top_k"] = Field(description="the k most probable tokens")
    k: int = Field(ge=1, le=MOST_UNITS, description="tokens that top_k keeps")

    def threshold(self, vocabulary_size: int) -> float:  # noqa: ARG002
        """k."""
        return self.k


class TopP(Vocabulary):
    """The fewest most probable tokens with a mass of p, for comparison."""

    rule: Literal["top_p"] = Field(description="the fewest most probable tokens with a mass of at least p")
    p: float = Field(gt=0, le=1, description="least mass that top_p keeps")

    def threshold(self, vocabulary_size: int) -> float:  # noqa: ARG002
        """p."""
        return self.p
