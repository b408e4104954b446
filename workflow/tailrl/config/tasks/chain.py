"""Chains of sums, whose number sets the length of a response."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered

UpTo99 = Annotated[int, Field(json_schema_extra={"maximum": 99})]  # which `ordered` checks


class ChainTask(GeneratedTask):
    """One number added again and again, modulo 100; a step adds 13 tokens to the solution, and none to the prompt."""

    name: Literal["chain"]
    steps: Annotated[tuple[UpTo99, UpTo99], ordered(99)] = Field(
        (2, 4), description="fewest and most sums in one problem"
    )
    largest: int = Field(99, ge=1, le=99, description="largest number that is added")
