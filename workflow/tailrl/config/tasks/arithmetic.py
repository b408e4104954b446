"""Generated sums and differences."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered

UpTo6 = Annotated[int, Field(json_schema_extra={"maximum": 6})]  # which `ordered` checks


class ArithmeticTask(GeneratedTask):
    """Generated sums and differences with a worked solution; the answer is an integer from 0 to 999."""

    name: Literal["arithmetic"] = "arithmetic"
    terms: Annotated[tuple[UpTo6, UpTo6], ordered(6)] = Field(
        (2, 4), description="fewest and most numbers in one problem"
    )
    largest: int = Field(19, ge=1, le=99, description="largest number in a problem")
    habit: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the steps with a carry or a borrow that a worked solution gets wrong as pupils do: a "
        "carry is forgotten, and a borrow takes the smaller digit from the larger",
    )
