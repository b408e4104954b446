"""Tasks: problems with answers that can be checked, and the one rule that scores a response.

A task is a module with `load(settings) -> Loaded` and one line in `LOADERS`; one that comes from the Hugging Face
hub has a line in `HUB` too.
"""

import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

from tailrl.settings import ArithmeticTask, Task
from tailrl.tasks import aime25, arithmetic, dapo_math
from tailrl.tasks.answers import boxed_integer, integer, last_boxed
from tailrl.tasks.loaded import Loaded
from tailrl.tasks.sources import fetch
from tailrl.tasks.verifier import MathVerifier

LOADERS: dict[str, Callable[[Any], Loaded]] = {
    "arithmetic": arithmetic.load,
    "dapo_math": dapo_math.load,
    "aime25": aime25.load,
}
HUB = {
    "dapo_math": (dapo_math.HUB_NAME, dapo_math.SPLIT),
    "aime25": (aime25.HUB_NAME, aime25.SPLIT),
}


def load_task(task: Task) -> Loaded:
    """The problems that a task's settings name; raises StudyError where there are none to be had."""
    return LOADERS[task.name](task)


def download_task(task: Task) -> None:
    """Fetch the task's data set into the Hugging Face cache, for nodes without a network.

    Nothing to do for generated problems and local files; raises StudyError where the hub is out of reach.
    """
    if not isinstance(task, ArithmeticTask) and task.path is None:
        fetch(*HUB[task.name])


def score(response: str, answer: str) -> float:
    r"""1.0 where the last `\boxed{}` of the response holds the answer, else 0.0.

    Integers are compared here. Any other answer goes to math-verify, whose worker process starts at the first one
    and lives as long as this process.
    """
    gold = integer(answer)
    if gold is not None:
        return float(boxed_integer(response) == gold)
    boxed = last_boxed(response)
    return float(boxed is not None and _verifier().equal(boxed, answer))


@cache
def _verifier() -> MathVerifier:
    verifier = MathVerifier()
    atexit.register(verifier.close)
    return verifier
