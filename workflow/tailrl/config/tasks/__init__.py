"""The block of a study that names a task: generated problems, or a published data set.

Each module of this package is one task's settings, a subclass of `GeneratedTask` or `DataSetTask` whose `name` is the
module's. Studies find a new module by themselves, so that an added task changes no source file of other runs.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from tailrl.config.base import LARGEST_SEED, MOST_PROBLEMS, Kinds, Options
from tailrl.runtime.import_path import FORM


def ordered(most: int) -> AfterValidator:
    """Accepts two numbers from 2 to `most`, the smaller one first."""

    def check(numbers: tuple[int, int]) -> tuple[int, int]:
        if not 2 <= numbers[0] <= numbers[1] <= most:
            raise ValueError(f"needs two numbers from 2 to {most}, the smaller one first")
        return numbers

    return AfterValidator(check)


# Left out of what is recorded where it is not set, so that finished runs stay what they are.
Reward = Annotated[
    str | None,
    Field(
        pattern=FORM,
        exclude_if=lambda value: value is None,
        description="the import path of a reward of your own, (prompt, response, row), or as verl and TRL have it; "
        "null: 1 for the right answer, else 0",
    ),
]


class Task(Kinds):
    """Problems to train or to be evaluated on."""

    TOLD_BY: ClassVar = "name"
    USUAL: ClassVar = "arithmetic"

    name: str
    reward: Reward = None
    problems: int | None = Field(None, ge=1, le=MOST_PROBLEMS, description="keep this many problems; null: all")


class GeneratedTask(Task):
    """Generated problems, each with a worked solution; equal seeds give equal problems."""

    problems: int = Field(4096, ge=1, le=MOST_PROBLEMS, description="how many different problems are generated")
    slip: float = Field(0.0, ge=0, lt=1, description="probability that a step of a worked solution goes wrong")
    seed: int = Field(0, le=LARGEST_SEED, description="seed of the generator")


class DataSetTask(Task):
    """A published data set, from the Hugging Face hub or from a file."""

    path: str | None = Field(None, min_length=1, description="a local .parquet or .jsonl file with the same columns")


class ImportedTask(GeneratedTask):
    """Problems of a function of your own: `function(problems, seed, **options)` gives them, or rows of their fields."""

    name: str = Field(pattern=FORM, description="the import path of the function")
    options: Options = Field(default_factory=dict, description="more arguments of the function")


for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"{__name__}.{file.stem}")
