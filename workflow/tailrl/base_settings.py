"""The blocks that come before any arm: what every block is, the task, and the policy to start from."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator


class Settings(BaseModel):
    """What every block of a study is: immutable, and closed to keys that it does not know."""

    # No infinity and no NaN: the rules hand settings on as JSON, which has neither.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# --- tasks -------------------------------------------------------------------------------------------


class GeneratedTask(Settings):
    """Problems made here, each with a worked solution: the same for everybody under the same seed."""

    name: str
    problems: int = Field(4096, ge=1, description="how many different problems are generated")
    slip: float = Field(0.0, ge=0, lt=1, description="probability that a step of a worked solution goes wrong")
    seed: int = Field(0, description="seed of the generator")


class ArithmeticTask(GeneratedTask):
    """Generated sums and differences with a worked solution; the answer is an integer from 0 to 999."""

    name: Literal["arithmetic"] = "arithmetic"
    terms: tuple[int, int] = Field((2, 4), description="fewest and most numbers in one problem")
    largest: int = Field(19, ge=1, le=99, description="largest number in a problem")

    @field_validator("terms")
    @classmethod
    def _ordered(cls, terms: tuple[int, int]) -> tuple[int, int]:
        if not 2 <= terms[0] <= terms[1] <= 6:
            raise ValueError("needs two numbers from 2 to 6, the smaller one first")
        return terms


class WordsTask(GeneratedTask):
    """Words to be put into alphabetical order; the answer is text, and any word may be its next one."""

    name: Literal["words"]
    words: tuple[int, int] = Field((3, 4), description="fewest and most words in one problem")

    @field_validator("words")
    @classmethod
    def _ordered(cls, words: tuple[int, int]) -> tuple[int, int]:
        if not 2 <= words[0] <= words[1] <= 8:
            raise ValueError("needs two numbers from 2 to 8, the smaller one first")
        return words


class DataSetTask(Settings):
    """A published data set, from the Hugging Face hub or from a file."""

    path: str | None = Field(None, description="a local .parquet or .jsonl file with the same columns")
    problems: int | None = Field(None, ge=1, description="keep this many problems; all of them if null")


class DapoMathTask(DataSetTask):
    """BytedTsinghua-SIA/DAPO-Math-17k: competition mathematics with integer answers."""

    name: Literal["dapo_math"]


class Aime25Task(DataSetTask):
    """math-ai/aime25: the 30 problems of AIME 2025, answers from 0 to 999."""

    name: Literal["aime25"]


def told_apart_by(field: str, default: str) -> Discriminator:
    """Tells the members of a union apart by a field, which has a default in YAML too."""

    def kind(value: object) -> object:
        return value.get(field, default) if isinstance(value, dict) else getattr(value, field, None)

    return Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message=f"needs a block whose {field} is one of those in the schema",
    )


_Generated = Annotated[ArithmeticTask, Tag("arithmetic")] | Annotated[WordsTask, Tag("words")]
_DataSet = Annotated[DapoMathTask, Tag("dapo_math")] | Annotated[Aime25Task, Tag("aime25")]

Generated = Annotated[_Generated, told_apart_by("name", "arithmetic")]
Task = Annotated[_Generated | _DataSet, told_apart_by("name", "arithmetic")]


# --- policy ------------------------------------------------------------------------------------------


class WarmStart(Settings):
    """Supervised training of a policy made from scratch, so that reinforcement learning has a start.

    The stages follow one another, each worked solution read once. By default the policy learns to calculate, and
    then to imitate a corpus in which every third step has a slip: a base policy that can do better than it does.
    """

    stages: tuple[Generated, ...] = Field(
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
    told_apart_by("source", "scratch"),
]
