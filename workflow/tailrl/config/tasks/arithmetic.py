"""Generated sums and differences."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered


class ArithmeticTask(GeneratedTask):
    """Generated sums and differences with a worked solution; the answer is an integer from 0 to 999."""

    name: Literal["arithmetic"] = "arithmetic"
    terms: Annotated[tuple[int, int], ordered(6)] = Field((2, 4), description="fewest and most numbers in one problem")
    largest: int = Field(19, ge=1, le=99, description="largest number in a problem")
