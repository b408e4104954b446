"""What the command line gives of a log, of two logs or of curves: a text, a page and data."""

from dataclasses import dataclass, replace

from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.record import AnyRecord
from tailrl.diagnosis.replay import catalogue
from tailrl.pages.explorer import without_text
from tailrl.runtime.errors import StudyError


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
        raise StudyError(f"--framework {name}: known are {', '.join(known.values())}")
    return known[name.lower()]


def without_texts(diagnosis: Diagnosis) -> Diagnosis:
    """The same without texts and token ids, which a tokenizer turns into texts."""
    return replace(diagnosis, responses=tuple(map(without_text, diagnosis.responses)))
