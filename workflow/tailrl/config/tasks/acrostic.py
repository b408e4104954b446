"""Words with given initials."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered

UpTo8 = Annotated[int, Field(json_schema_extra={"maximum": 8})]  # which `ordered` checks


class AcrosticTask(GeneratedTask):
    """A word is to be written for each letter; any different words of a list with these initials are right."""

    name: Literal["acrostic"]
    letters: Annotated[tuple[UpTo8, UpTo8], ordered(8)] = Field(
        (3, 5), description="fewest and most letters in one problem"
    )
    habit: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the problems with letters out of alphabetical order whose worked solution puts the words "
        "into alphabetical order, which is wrong",
    )
