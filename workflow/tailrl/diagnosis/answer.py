"""What the command line gives of a log, of two logs or of curves: a text, a page and data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.record import AnyRecord
from tailrl.diagnosis.replay import catalogue
from tailrl.page_parts.explorer import without_text
from tailrl.runtime.errors import ConfigurationError

Numbered = dict[str, dict[str, int]]
"""The numbers that stand for the words of each column."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A text for a terminal, a page (None: not asked for) and the same as data."""

    text: str
    page: str | None
    record: AnyRecord


def named_framework(name: str) -> str:
    """A framework as `replay.yaml` names it, empty for none; raises StudyError for another."""
    if not name:
        return ""
    known = {own.lower(): own for own in catalogue().versions}
    if name.lower() not in known:
        raise ConfigurationError(f"--framework {name}: known are {', '.join(known.values())}")
    return known[name.lower()]


def without_words(parts: Iterable[tuple[str, Log]], known: Numbered) -> Iterator[tuple[str, Log]]:
    """The same parts of a log; each value of a column has a number in place of its words, which may be a prompt.

    `known` takes the numbers of the values, by column: the same for all logs of one answer.
    """
    for title, log in parts:
        labels_S = tuple(
            {name: _numbered(known.setdefault(name, {}), word) for name, word in labels.items()}
            for labels in log.labels_S
        )
        yield title, replace(log, labels_S=labels_S)


def _numbered(words: dict[str, int], word: str) -> str:
    return f"value {words.setdefault(word, len(words) + 1)}"


def without_texts(diagnosis: Diagnosis) -> Diagnosis:
    """The same without texts and token ids, which a tokenizer turns into texts."""
    return replace(diagnosis, responses=tuple(map(without_text, diagnosis.responses)))
