"""A problem with a verifiable answer, and the JSONL file of problems."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tailrl.runtime.errors import DataError, StorageError, one_line, reason
from tailrl.runtime.import_path import is_import_path
from tailrl.runtime.jsonl import numbered_lines
from tailrl.runtime.limits import regular

COMPARED = ("math", "integer", "text", "initials")
"""How `tasks.scoring` compares an answer: as a number or formula, as a written integer, as text, or as the initials of
any words of a list. A problem may have the import path of a reward of the user's own instead."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem: its prompt as the policy reads it, its answer, and how answers are compared.

    Generated tasks also give a worked solution, which a warm start learns from. `level` is the place of its task in a
    curriculum.
    """

    id: str
    prompt: str
    answer: str
    solution: str = ""
    compared: str = "math"
    level: int = 0


def write_problems(problems: Iterable[Problem], path: Path) -> None:
    """One JSON object a line; without the level where it is 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            fields = asdict(problem)
            if not problem.level:
                del fields["level"]
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def read_problems(path: Path) -> list[Problem]:
    """The problems of a JSONL file; raises StudyError naming the file and line that cannot be used."""
    problems = []
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in numbered_lines(file, path):
                try:
                    problem = Problem(**json.loads(line.decode("utf-8")))
                    texts = [value for key, value in asdict(problem).items() if key != "level"]
                    if not all(isinstance(value, str) for value in texts):
                        raise TypeError("every field but the level must be text")
                    if type(problem.level) is not int or problem.level < 0:
                        raise ValueError("its level must be a whole number from 0")
                    if not problem.prompt:
                        raise ValueError("its prompt is empty")
                    if problem.compared not in COMPARED and not is_import_path(problem.compared):
                        raise ValueError(f"compared must be one of {', '.join(COMPARED)}, or an import path")
                    "".join(texts).encode()  # a lone surrogate is JSON, but no tokenizer reads it
                    problems.append(problem)
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number}: not a problem: {one_line(error)}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {reason(error)}") from None
    if not problems:
        raise DataError(f"{path}: holds no problem")
    return problems
