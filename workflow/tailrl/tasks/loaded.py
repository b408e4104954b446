"""What loading a task gives: the problems, and the rows that could not become one."""

import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrl.config.tasks import GeneratedTask
from tailrl.runtime.errors import ConfigurationError
from tailrl.tasks.problem import Problem

MOST_IN_VAIN = 10_000
"""After so many draws in a row without a new problem, none is assumed to be left."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Problems in the order of their source; `skipped` lists, by reason, the rows that could not be used."""

    problems: list[Problem]
    skipped: dict[str, list[str]] = field(default_factory=dict)


def canonical(text: str) -> str:
    """A text with white space and Unicode forms normalised: equal for the same problem or answer."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def generated(task: GeneratedTask, draw: Callable[[random.Random, GeneratedTask], Problem]) -> Loaded:
    """As many problems with different prompts as the task asks for, drawn under its seed.

    Raises:
        StudyError: too few different problems exist.
    """
    rng = random.Random(task.seed)
    problems: dict[str, Problem] = {}
    in_vain = 0
    while len(problems) < task.problems:
        problem = draw(rng, task)
        in_vain = in_vain + 1 if problem.prompt in problems else 0
        if in_vain == MOST_IN_VAIN:
            raise ConfigurationError(
                f"task {task.name}: {task.problems} different problems with its settings do not exist"
            )
        problems.setdefault(problem.prompt, problem)
    return Loaded(list(problems.values()))
