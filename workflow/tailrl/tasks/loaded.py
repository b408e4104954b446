"""What loading a task gives: the problems, and the rows that could not become one."""

import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrl.config.task import GeneratedTask
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem

MOST_IN_VAIN = 10_000
"""Draws in a row that give no new problem, after which there is none."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Problems in the order of their source; `skipped` lists, by reason, the rows that could not be used."""

    problems: list[Problem]
    skipped: dict[str, list[str]] = field(default_factory=dict)


def canonical(text: str) -> str:
    """Equal for texts that agree up to white space and Unicode's composed forms: the same problem, the same answer."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def generated(task: GeneratedTask, draw: Callable[[random.Random], Problem]) -> Loaded:
    """As many problems of different prompts as the task asks for, drawn one after another under its seed.

    Raises:
        StudyError: they are so rare among those drawn that they hardly exist.
    """
    rng = random.Random(task.seed)
    problems: dict[str, Problem] = {}
    in_vain = 0
    while len(problems) < task.problems:
        problem = draw(rng)
        in_vain = in_vain + 1 if problem.prompt in problems else 0
        if in_vain == MOST_IN_VAIN:
            raise StudyError(f"task {task.name}: {task.problems} different problems with its settings do not exist")
        problems.setdefault(problem.prompt, problem)
    return Loaded(list(problems.values()))
