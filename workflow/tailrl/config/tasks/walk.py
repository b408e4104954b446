"""Walks whose length sets the length of a response."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered


class WalkTask(GeneratedTask):
    """Walks on a cycle of ten letters; a step adds 8 tokens to the solution, and the prompt keeps its length."""

    name: Literal["walk"]
    steps: Annotated[tuple[int, int], ordered(99)] = Field((2, 7), description="fewest and most steps of one walk")
