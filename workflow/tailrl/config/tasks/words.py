"""Words to sort."""

from typing import Annotated, Literal

from pydantic import Field

from tailrl.config.tasks import GeneratedTask, ordered


class WordsTask(GeneratedTask):
    """Words to put into alphabetical order; the answer is text, in which any word may come next."""

    name: Literal["words"]
    words: Annotated[tuple[int, int], ordered(8)] = Field((3, 4), description="fewest and most words in one problem")
