"""The block of a study whose task becomes harder as the reward rises."""

from typing import Annotated

from pydantic import Field

from tailrl.config.base import MOST_STEPS, Settings
from tailrl.config.tasks import GeneratedTask


class Curriculum(Settings):
    """Harder and harder tasks after the study's own. A run goes on to the next one by its own rewards."""

    harder: Annotated[tuple[GeneratedTask, ...], Field(min_length=1)] = Field(
        description="the tasks after the study's own, in their order"
    )
    above: float = Field(
        0.8, gt=0, lt=1, description="the next task begins after a mean reward over `window` steps of at least this"
    )
    window: int = Field(20, ge=1, le=MOST_STEPS, description="steps of that mean, all of them on the task at hand")
