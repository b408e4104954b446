"""The block of a study that says which policy to start from."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.base import (
    LARGEST_RATE,
    LARGEST_SEED,
    MOST_RESPONSES,
    MOST_TOKENS,
    MOST_UNITS,
    Kinds,
    Settings,
)
from tailrl.config.tasks import GeneratedTask
from tailrl.config.tasks.arithmetic import ArithmeticTask


class WarmStart(Settings):
    """Supervised training of a policy from scratch, before reinforcement learning.

    The stages follow one another; each worked solution is read once. By default the policy first learns to calculate.
    Then it imitates a corpus with a slip in every third step, which leaves the base policy room to improve.
    """

    stages: tuple[GeneratedTask, ...] = Field(
        (ArithmeticTask(problems=16000, seed=1), ArithmeticTask(problems=3200, slip=0.35, seed=3)),
        min_length=1,
        description="worked solutions to learn from, in this order",
    )
    batch: int = Field(64, ge=1, le=MOST_RESPONSES, description="worked solutions per optimizer step")
    learning_rate: float = Field(
        3e-3, gt=0, le=LARGEST_RATE, description="peak of the rate, which falls to zero linearly"
    )
    load_balancing: float = Field(
        0.01,
        ge=0,
        le=LARGEST_RATE,
        description="weight of the load-balancing loss of a mixture of experts, which is K where all experts get the "
        "same number of tokens; a dense policy has none",
    )
    seed: int = Field(0, le=LARGEST_SEED, description="seed of the initial weights")


MOST_WEIGHTS = 100_000_000_000
"""Of a policy from scratch: 1.6 TB with gradients and optimizer."""


class Policy(Kinds):
    """The policy to start from."""

    TOLD_BY: ClassVar = "source"
    USUAL: ClassVar = "scratch"

    source: str = "scratch"

    @property
    def folder(self) -> str | None:
        """The folder, or the name on the hub, of a pretrained policy; None: it is made from scratch."""
        return self._setting("path", None)


class ScratchPolicy(Policy):
    """A small Llama, or with experts a Qwen3-MoE, with its own tokenizer, made and warm-started by the pipeline."""

    source: Literal["scratch"] = "scratch"
    vocabulary_size: int = Field(
        2048, ge=512, le=MOST_UNITS, description="tokens of its tokenizer, which is trained for it"
    )
    hidden_size: int = Field(128, ge=32, le=MOST_UNITS, description="width of the residual stream")
    layers: int = Field(4, ge=1, le=MOST_UNITS, description="transformer blocks")
    heads: int = Field(4, ge=1, le=MOST_UNITS, description="attention heads; hidden_size / heads must be 32, 64 or 128")
    intermediate_size: int = Field(
        384, ge=32, le=MOST_UNITS, description="width of the gated MLP; with experts, of each expert's"
    )
    experts: int | None = Field(
        None, ge=2, le=2048, description="E, experts of each layer, which a router chooses from; null: one dense MLP"
    )
    experts_per_token: int = Field(2, ge=1, le=MOST_UNITS, description="K, experts that a router chooses for a token")
    max_length: int = Field(256, ge=32, le=MOST_TOKENS, description="longest prompt and response together, tokens")
    warm_start: WarmStart = WarmStart()

    @model_validator(mode="after")
    def _head_size(self) -> Self:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in (32, 64, 128):
            raise ValueError("hidden_size / heads must be 32, 64 or 128 (what vLLM's attention supports)")
        return self

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        mlp = 3 * self.hidden_size * self.intermediate_size * (self.experts or 1)
        weights = 2 * self.vocabulary_size * self.hidden_size + self.layers * (4 * self.hidden_size**2 + mlp)
        if weights > MOST_WEIGHTS:
            raise ValueError(f"its {weights:.0e} weights are more than {MOST_WEIGHTS:.0e}: lower hidden_size or layers")
        return self

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        if self.experts is None:
            if self.experts_per_token != type(self).model_fields["experts_per_token"].default:
                raise ValueError("experts_per_token says nothing without experts")
            return self
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token: {self.experts_per_token} of {self.experts} experts")
        if self.hidden_size % 32 or self.intermediate_size % 32:
            raise ValueError(
                "with experts, hidden_size and intermediate_size must be multiples of 32 (what vLLM takes)"
            )
        return self


MADE_MODELS = {
    "results/models/smollm2": "",
    "results/models/smollm2_shots": "words",
    "results/models/smollm2_sums": "sums",
}
"""Folders of pretrained policies that the workflow makes, and the task of the worked examples that prompt them."""


TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "tekken.json"),
)
"""Files of which a folder has one where it has a tokenizer."""


def lies(kind: Callable[[Path], bool], path: str | Path) -> bool:
    """Whether a file or folder of this kind lies at the path; False for a path that is too long for the system."""
    try:
        return kind(Path(path))
    except OSError:
        return False


def lacking(folder: Path) -> str | None:
    """What a folder in Hugging Face format lacks, by the names of its files."""
    if not (folder / "config.json").is_file():
        return "it holds no config.json"
    if not any(folder.glob("*.safetensors*")):
        return "it holds no weights (*.safetensors)"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return "it holds no tokenizer (tokenizer.json)"
    return None


class PretrainedPolicy(Policy):
    """A Hugging Face model: a folder on this machine, or a name on the hub."""

    source: Literal["pretrained"]
    path: str = Field(min_length=1, description="a folder in Hugging Face format, or a model's name on the hub")
