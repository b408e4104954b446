"""The tasks: each is a module with `load(settings) -> Loaded` and a line in `LOADERS`. Data sets from the Hugging Face
hub also have a line in `HUB`."""

from collections.abc import Callable
from typing import Any

from tailrl.config.task import DataSetTask, Task
from tailrl.tasks import aime25, arithmetic, dapo_math, words
from tailrl.tasks.loaded import Loaded
from tailrl.tasks.sources import fetch

LOADERS: dict[str, Callable[[Any], Loaded]] = {
    "arithmetic": arithmetic.load,
    "words": words.load,
    "dapo_math": dapo_math.load,
    "aime25": aime25.load,
}
HUB = {
    "dapo_math": (dapo_math.HUB_NAME, dapo_math.SPLIT),
    "aime25": (aime25.HUB_NAME, aime25.SPLIT),
}


def load_task(task: Task) -> Loaded:
    """The problems that a task's settings name; raises StudyError if there are none."""
    return LOADERS[task.name](task)


def download_task(task: Task) -> None:
    """Fetch the task's data set into the Hugging Face cache, for nodes without a network.

    Nothing to do for generated problems and local files; raises StudyError where the hub is out of reach.
    """
    if isinstance(task, DataSetTask) and task.path is None:
        fetch(*HUB[task.name])
