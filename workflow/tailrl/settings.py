"""The blocks of a study: what is computed, with units, defaults and descriptions.

An arm is one flat record (estimator, vocabulary, correction, sampler, training overrides); an ablation is a base
arm and the values one of its fields takes. Where jobs run (threads, GPUs, partitions, folders) is not in here:
that belongs to Snakemake's profiles and command line.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator


class Settings(BaseModel):
    """What every block of a study is: immutable, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- tasks -------------------------------------------------------------------------------------------


class ArithmeticTask(Settings):
    """Generated sums and differences with a worked solution; the answer is an integer from 0 to 999."""

    name: Literal["arithmetic"] = "arithmetic"
    problems: int = Field(4096, ge=1, description="how many different problems are generated")
    terms: tuple[int, int] = Field((2, 4), description="fewest and most numbers in one problem")
    largest: int = Field(19, ge=1, le=99, description="largest number in a problem")
    slip: float = Field(0.0, ge=0, lt=1, description="probability that a step of a worked solution gets a digit wrong")
    seed: int = Field(0, description="seed of the generator")

    @field_validator("terms")
    @classmethod
    def _ordered(cls, terms: tuple[int, int]) -> tuple[int, int]:
        if not 2 <= terms[0] <= terms[1] <= 6:
            raise ValueError("needs two numbers from 2 to 6, the smaller one first")
        return terms


class DapoMathTask(Settings):
    """BytedTsinghua-SIA/DAPO-Math-17k: competition mathematics with integer answers."""

    name: Literal["dapo_math"]
    path: str | None = Field(None, description="a local .parquet or .jsonl file with the same columns")
    problems: int | None = Field(None, ge=1, description="keep this many problems; all of them if null")


class Aime25Task(Settings):
    """math-ai/aime25: the 30 problems of AIME 2025, answers from 0 to 999."""

    name: Literal["aime25"]
    path: str | None = Field(None, description="a local .parquet or .jsonl file with the same columns")
    problems: int | None = Field(None, ge=1, description="keep this many problems; all of them if null")


def _kind(field: str, default: str) -> Discriminator:
    """Tells the members of a union apart by a field, which has a default in YAML too."""

    def kind(value: object) -> object:
        return value.get(field, default) if isinstance(value, dict) else getattr(value, field, None)

    return Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message=f"needs a block whose {field} is one of those in the schema",
    )


Task = Annotated[
    Annotated[ArithmeticTask, Tag("arithmetic")]
    | Annotated[DapoMathTask, Tag("dapo_math")]
    | Annotated[Aime25Task, Tag("aime25")],
    _kind("name", "arithmetic"),
]


# --- policy ------------------------------------------------------------------------------------------


class WarmStart(Settings):
    """Supervised training of a policy made from scratch, so that reinforcement learning has a start.

    The stages follow one another, each worked solution read once. By default the policy learns to calculate, and
    then to imitate a corpus in which every third step has a slip: a base policy that can do better than it does.
    """

    stages: tuple[ArithmeticTask, ...] = Field(
        (ArithmeticTask(problems=16000, seed=1), ArithmeticTask(problems=3200, slip=0.35, seed=3)),
        min_length=1,
        description="worked solutions to learn from, in this order",
    )
    batch: int = Field(64, ge=1, description="worked solutions per optimizer step")
    learning_rate: float = Field(3e-3, gt=0, description="peak of the rate; it falls to zero linearly")
    seed: int = Field(0, description="seed of the initial weights")


class ScratchPolicy(Settings):
    """A small Llama with its own tokenizer, made and warm-started by the pipeline."""

    source: Literal["scratch"] = "scratch"
    vocabulary_size: int = Field(2048, ge=512, description="tokens in the tokenizer trained for it")
    hidden_size: int = Field(128, ge=32, description="width of the residual stream")
    layers: int = Field(4, ge=1, description="transformer blocks")
    heads: int = Field(4, ge=1, description="attention heads; hidden_size / heads must be 32, 64 or 128")
    intermediate_size: int = Field(384, ge=32, description="width of the gated MLP")
    max_length: int = Field(256, ge=32, description="longest prompt and response together, tokens")
    warm_start: WarmStart = WarmStart()

    @model_validator(mode="after")
    def _head_size(self) -> Self:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in (32, 64, 128):
            raise ValueError("hidden_size / heads must be 32, 64 or 128 (what vLLM's attention supports)")
        return self


class PretrainedPolicy(Settings):
    """A Hugging Face model: a folder on this machine, or a name on the hub."""

    source: Literal["pretrained"]
    path: str = Field(description="a folder in Hugging Face format, or a model's name on the hub")


Policy = Annotated[
    Annotated[ScratchPolicy, Tag("scratch")] | Annotated[PretrainedPolicy, Tag("pretrained")],
    _kind("source", "scratch"),
]


# --- arms --------------------------------------------------------------------------------------------

_RHO = re.compile(r"^(e-?\d+(\.\d+)?|\d+(\.\d+)?(e-?\d+)?(/V)?)$")


def log_rho(rho: str, vocabulary_size: int) -> float:
    """ln ρ (natural log) of a threshold written as `e-13` (that is e⁻¹³), `1e-6` or `0.34/V`."""
    if rho.startswith("e"):
        return float(rho[1:])
    number, _, per_vocabulary = rho.partition("/")
    value = float(number) / (vocabulary_size if per_vocabulary else 1)
    return math.log(value) if value > 0 else -math.inf


class Vocabulary(Settings):
    """The vocabulary that the objective lives on, in the sampler and, independently, in the trainer."""

    rule: Literal["full", "min_p"] = Field(
        "full", description="full: all tokens; min_p: those with at least rho times the largest probability"
    )
    rho: str | None = Field(
        None, description="min-p threshold relative to the maximum, as text: e-13 (= exp(-13)), 1e-6 or 0.34/V"
    )
    outside: Literal["drop", "paper_fill"] = Field(
        "drop",
        description="a sampled token outside the trainer's set, where no ratio is used: drop its term, or "
        "score it with the paper's fill of -50",
    )

    @field_validator("rho", mode="before")
    @classmethod
    def _as_text(cls, rho: object) -> object:
        # YAML readers disagree on whether 1e-6 is a number: either way one spelling leaves here.
        return repr(rho) if isinstance(rho, int | float) and not isinstance(rho, bool) else rho

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rule == "full":
            if self.rho is not None:
                raise ValueError("rho is given but rule is full: write rule: min_p, or leave rho out")
            if self.outside != "drop":
                raise ValueError("outside: paper_fill needs rule: min_p (nothing lies outside a full vocabulary)")
        elif self.rho is None:
            raise ValueError("rule: min_p needs rho")
        elif not _RHO.match(self.rho) or not -math.inf < log_rho(self.rho, 1000) <= 0:
            raise ValueError(f"rho is {self.rho!r}; write e-13, 1e-6 or 0.34/V, with a value in (0, 1]")
        return self

    def log_rho(self, vocabulary_size: int) -> float | None:
        """ln ρ for a vocabulary of this size, or None where nothing is pruned."""
        return None if self.rho is None else log_rho(self.rho, vocabulary_size)


class Correction(Settings):
    """Stop-gradient weights on sampled sequences, from Δ_y = Σ_t log π_train − log π_infer."""

    weight: Literal["none", "mis"] = Field(
        "none", description="none: 1; mis: exp(Δ_y) where it is at most threshold, else 0"
    )
    threshold: float = Field(2.0, gt=0, description="C, the largest weight that mis keeps (assumed)")
    veto: float | None = Field(
        None, gt=0, lt=1, description="discard a sequence with a token ratio below this; null: no veto"
    )


class SamplerSettings(Settings):
    """The engine that samples, and the number format it computes in."""

    engine: Literal["vllm"] = Field("vllm", description="the rollout engine")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype of the engine's weights and activations"
    )


Decay = Annotated[float, Field(ge=0, lt=1)]


class Training(Settings):
    """One reinforcement-learning run: sizes, optimizer and lengths."""

    steps: int = Field(100, ge=1, description="updates, each on fresh rollouts")
    prompts: int = Field(8, ge=1, description="different problems per step")
    group_size: int = Field(8, ge=2, description="responses per problem (n of RLOO's leave-one-out baseline)")
    max_new_tokens: int = Field(64, ge=1, description="longest response, tokens")
    temperature: float = Field(
        1.0, ge=0.01, description="divides the logits in the sampler and in the trainer; vLLM goes no lower than 0.01"
    )
    learning_rate: float = Field(1e-4, gt=0, description="AdamW's rate after warm-up")
    warmup_steps: int = Field(5, ge=0, description="steps over which the rate rises linearly")
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="AdamW's decay of the two moments")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(
        20.0, gt=0, description="gradients are scaled down to this 2-norm; of a loss that sums over tokens"
    )
    token_budget: int = Field(2048, ge=1, description="most tokens in one packed micro-batch")
    keep_tokens_every: int = Field(10, ge=1, description="keep the per-token record of every n-th step")


class Arm(Settings):
    """One way to train: a flat record, data and no code."""

    estimator: Literal["rloo"] = Field("rloo", description="how rewards become advantages")
    vocabulary: Vocabulary = Vocabulary()
    correction: Correction = Correction()
    sampler: SamplerSettings = SamplerSettings()
    training: dict[str, Any] = Field(default_factory=dict, description="training settings that differ in this arm")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.vocabulary.outside == "paper_fill" and (self.correction.weight != "none" or self.correction.veto):
            raise ValueError(
                "vocabulary.outside: paper_fill has no effect beside a correction or a veto, "
                "which give a sequence with an outside token weight 0"
            )
        return self


class Ablation(Settings):
    """A base arm, and the values that one of its fields takes."""

    base: str = Field(description="name of the arm that the ablation starts from")
    field: str = Field(description="dotted path of the field, such as vocabulary.rho")
    values: tuple[str | float | int | bool | None, ...] = Field(min_length=1, description="the values it takes")


class Evaluation(Settings):
    """Held-out problems through lm-eval: k samples for each."""

    task: Task = ArithmeticTask(problems=200)
    samples: int = Field(8, ge=1, description="k: responses per problem, for avg@k and pass@k")
    sampler: SamplerSettings = SamplerSettings()
    temperature: float = Field(1.0, ge=0.01, description="sampling temperature; vLLM goes no lower than 0.01")
    max_new_tokens: int = Field(64, ge=1, description="longest response, tokens")
    seed: int = Field(0, description="seed of the samples: the same for every policy")


class Problems(Settings):
    """The problems that a study needs: what the first job writes."""

    train: Task
    evaluation: Task
    warm_start: tuple[ArithmeticTask, ...]


class PolicyFile(Settings):
    """The policy alone: what the second job makes."""

    policy: Policy


class Run(Settings):
    """Everything that one training job needs, with the arm's overrides applied."""

    study: str
    arm: str
    policy: Policy
    task: Task
    estimator: Literal["rloo"]
    vocabulary: Vocabulary
    correction: Correction
    sampler: SamplerSettings
    training: Training
