"""What loading a task gives: the problems, and the rows that could not become one."""

import unicodedata
from dataclasses import dataclass, field

from tailrl.records import Problem


@dataclass(frozen=True, slots=True)
class Loaded:
    """Problems in the order of their source; `skipped` lists, by reason, the rows that could not be used."""

    problems: list[Problem]
    skipped: dict[str, list[str]] = field(default_factory=dict)


def same_problem_key(text: str) -> str:
    """Equal for texts of the same problem: those that agree up to white space and Unicode's composed forms."""
    return " ".join(unicodedata.normalize("NFC", text).split())
