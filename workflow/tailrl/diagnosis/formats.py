"""Each framework's names for our columns, and a row of its log as a sequence."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.columns import ids, last, numbers
from tailrl.diagnosis.log import OPTIONAL_NUMBERS, LoggedRow
from tailrl.runtime.errors import StudyError, few, one_line

SIDES = ("sampler", "trainer")
PER_TOKEN = (*SIDES, "token", *OPTIONAL_NUMBERS)


class Format(Record):
    """A framework's names for our columns.

    Attributes:
        title: what it is called.
        columns: our name to theirs.
        step_in_name: a pattern whose first group is the step in a file's name.
        source: what was read to know.
    """

    title: str
    columns: dict[str, str]
    step_in_name: str | None = None
    source: str | None = None


@cache
def formats() -> dict[str, Format]:
    """The known formats by name, in the order in which they are tried."""
    text = Path(__file__).with_name("formats.yaml").read_text(encoding="utf-8")
    return {name: Format.model_validate(given) for name, given in yaml.safe_load(text).items()}


def recognise(names: Iterable[str], where: str) -> Format:
    """The format that has these names; raises StudyError, which says what is missing, if there is none."""
    given = set(names)
    for known in formats().values():
        if all(known.columns[side] in given for side in SIDES):
            return known
    halves: dict[str, list[str]] = {}
    for known in formats().values():
        for side, other in (SIDES, SIDES[::-1]):
            if known.columns[side] in given:
                halves.setdefault(known.columns[side], []).append(known.columns[other])
    for has, lacks in halves.items():
        lacking = " or ".join(dict.fromkeys(lacks))
        raise StudyError(f"{where}: has {has} and no {lacking}: a mismatch needs the log-probs of both sides")
    plain = " and ".join(formats()["plain"].columns[side] for side in SIDES)
    titles = ", ".join(dict.fromkeys(known.title.partition(",")[0] for known in formats().values()))
    names = few(sorted(map(str, given))) or "nothing"
    raise StudyError(f"{where}: no known log: it has {names}, and not {plain}, nor the columns of {titles}")


def rows_of(given: Mapping[str, Any], known: Format, where: str) -> Iterator[Mapping[str, Any]]:
    """The sequences of a row: the row itself, or one for each line of a rectangle [B, T], B > 1.

    A column with B entries is one entry a sequence; any other is shared by all, such as the step.

    Raises:
        StudyError: one side is a rectangle, and the other is none of as many lines.
    """
    sides = [known.columns[side] for side in SIDES]
    lines = {name: _lines(given.get(name)) for name in sides}
    count = max(lines.values())
    if count < 2:
        yield given
        return
    if min(lines.values()) < count:
        shapes = " and ".join(f"{name} {'a list' if n == 1 else f'a table of {n} rows'}" for name, n in lines.items())
        raise StudyError(f"{where}: both sides' log-probs must have one shape, but here are {shapes}")
    of_each = {name for name in known.columns.values() if name in given and _length(given[name]) == count}
    for line in range(count):
        yield {name: value[line] if name in of_each else value for name, value in given.items()}


def _length(value: Any) -> int:
    """How many entries a list, an array or a tensor has; 0 for a number or a text."""
    if isinstance(value, list | tuple):
        return len(value)
    shape = _shape(value)
    return int(shape[0]) if shape else 0


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array or a tensor; () of what has none, as torch's nested tensors."""
    try:
        shape: tuple[int, ...] = getattr(value, "shape", ())
        return shape
    except RuntimeError:  # torch's word on a nested tensor
        return ()


def _lines(value: Any) -> int:
    """B of a rectangle [B, T]; 1 for a list of numbers."""
    if isinstance(value, list | tuple):
        return len(value) if value and all(isinstance(one, list | tuple) or _length(one) for one in value) else 1
    shape = _shape(value)
    return int(shape[0]) if len(shape) == 2 else 1


def row_of(given: Mapping[str, Any], known: Format, where: str, step: float = np.nan) -> LoggedRow | None:
    """One sequence from a row of a log; None if the log leaves it out.

    Raises:
        StudyError: a column is no list of numbers, or two columns differ in length.
    """
    columns = {name: given[theirs] for name, theirs in known.columns.items() if given.get(theirs) is not None}
    if "kept" in columns and not _one(columns["kept"], known, "kept", where):
        return None
    found = {name: _numbers(columns[name], known, name, where) for name in (*PER_TOKEN, "mask") if name in columns}
    if absent := [known.columns[side] for side in SIDES if side not in found]:
        raise StudyError(f"{where}: {absent[0]} is missing")
    length = len(found["sampler"])
    for name, values in found.items():
        if name == "token" and len(values) > length:
            found[name] = values[len(values) - length :]  # the prompt comes first
        elif name == "advantage" and len(values) == 1:
            found[name] = np.full(length, values[0])
        elif len(values) != length:
            raise StudyError(
                f"{where}: {known.columns[name]} has {len(values)} numbers, and {known.columns['sampler']} {length}"
            )
    if "mask" in found:
        chosen_T = found.pop("mask") > 0
        found = {name: values[chosen_T] for name, values in found.items()}
    numbers = {
        name: _one(columns[name], known, name, where) for name in ("step", "version", "reward") if name in columns
    }
    text = columns.get("text")
    return LoggedRow(
        where=where,
        sampler_T=found["sampler"],
        trainer_T=found["trainer"],
        token_T=ids(found["token"]) if "token" in found else None,
        **{f"{name}_T": found.get(name) for name in OPTIONAL_NUMBERS},
        step=numbers.get("step", step),
        version=numbers.get("version", np.nan),
        reward=numbers.get("reward", np.nan),
        text=str(text[0] if isinstance(text, list) and text else text) if text is not None else None,
    )


def _numbers(value: Any, known: Format, name: str, where: str) -> FloatArray:
    """A list of numbers, or a batch of one; null is NaN."""
    try:
        found = numbers(value)
    except ValueError:
        found = np.empty((2, 2))
    if found.ndim == 0 and name in SIDES:
        raise StudyError(
            f"{where}: {known.columns[name]} is one number, {one_line(value)}; a row is one response, with a list of "
            "its tokens' numbers"
        )
    if (found.ndim > 1 and len(found) != 1) or found.ndim > 2:
        raise StudyError(f"{where}: {known.columns[name]} is no list of numbers: {_shown(value)}")
    return found.reshape(-1)


def _one(value: Any, known: Format, name: str, where: str) -> float:
    """A number of the whole sequence; of several versions the last, which gave the last tokens."""
    try:
        return last(value)
    except ValueError:
        if name == "version":  # a name such as a digest says nothing of an order
            return np.nan
        raise StudyError(f"{where}: {known.columns[name]} is no number: {_shown(value)}") from None


def _shown(value: Any) -> str:
    try:
        return one_line(value)
    except Exception:  # a tensor without data may not be printed
        return type(value).__name__
