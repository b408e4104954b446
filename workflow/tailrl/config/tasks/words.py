"""Words to sort."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered

UpTo8 = Annotated[int, Field(json_schema_extra={"maximum": 8})]  # which `ordered` checks


class WordsTask(GeneratedTask):
    """Words to put into alphabetical order; the answer is text, in which any word may come next."""

    name: Literal["words"]
    words: Annotated[tuple[UpTo8, UpTo8], ordered(8)] = Field(
        (3, 4), description="fewest and most words in one problem"
    )
