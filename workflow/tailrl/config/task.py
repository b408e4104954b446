"""The block of a study that names a task: generated problems, or a published data set."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Tag

from tailrl.config.base import Settings, told_apart_by


def _ordered(most: int) -> AfterValidator:
    """Accepts two numbers from 2 to `most`, the smaller one first."""

    def check(numbers: tuple[int, int]) -> tuple[int, int]:
        if not 2 <= numbers[0] <= numbers[1] <= most:
            raise ValueError(f"needs two numbers from 2 to {most}, the smaller one first")
        return numbers

    return AfterValidator(check)


class GeneratedTask(Settings):
    """Generated problems, each with a worked solution; equal seeds give equal problems."""

    name: str
    problems: int = Field(4096, ge=1, description="how many different problems are generated")
    slip: float = Field(0.0, ge=0, lt=1, description="probability that a step of a worked solution goes wrong")
    seed: int = Field(0, description="seed of the generator")


class ArithmeticTask(GeneratedTask):
    """Generated sums and differences with a worked solution; the answer is an integer from 0 to 999."""

    name: Literal["arithmetic"] = "arithmetic"
    terms: Annotated[tuple[int, int], _ordered(6)] = Field((2, 4), description="fewest and most numbers in one problem")
    largest: int = Field(19, ge=1, le=99, description="largest number in a problem")


class WordsTask(GeneratedTask):
    """Words to put into alphabetical order; the answer is text, in which any word may come next."""

    name: Literal["words"]
    words: Annotated[tuple[int, int], _ordered(8)] = Field((3, 4), description="fewest and most words in one problem")


class DataSetTask(Settings):
    """A published data set, from the Hugging Face hub or from a file."""

    path: str | None = Field(None, description="a local .parquet or .jsonl file with the same columns")
    problems: int | None = Field(None, ge=1, description="keep this many problems; null: all")


class DapoMathTask(DataSetTask):
    """BytedTsinghua-SIA/DAPO-Math-17k: competition mathematics with integer answers."""

    name: Literal["dapo_math"]


class Aime25Task(DataSetTask):
    """math-ai/aime25: the 30 problems of AIME 2025, answers from 0 to 999."""

    name: Literal["aime25"]


_Generated = Annotated[ArithmeticTask, Tag("arithmetic")] | Annotated[WordsTask, Tag("words")]
_DataSet = Annotated[DapoMathTask, Tag("dapo_math")] | Annotated[Aime25Task, Tag("aime25")]

Generated = Annotated[_Generated, told_apart_by("name", "arithmetic")]
Task = Annotated[_Generated | _DataSet, told_apart_by("name", "arithmetic")]
