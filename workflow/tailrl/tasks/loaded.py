"""What loading a task gives: the problems, and the rows that could not become one."""

from dataclasses import dataclass, field

from tailrl.records import Problem


@dataclass(frozen=True, slots=True)
class Loaded:
    """Problems in the order of their source; `skipped` lists, by reason, the rows that could not be used."""

    problems: list[Problem]
    skipped: dict[str, list[str]] = field(default_factory=dict)
