"""Tables with a token a row, as CSV has them: the rows of a response become one."""

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from tailrl.diagnosis.columns import is_json_list, json_list
from tailrl.diagnosis.formats import PER_TOKEN, Format, has_sides, is_scalar, recognise
from tailrl.diagnosis.left_out import RowError
from tailrl.diagnosis.log import SIDES
from tailrl.runtime.errors import DataError, one_line

GivenRow = tuple[str, Mapping[str, Any] | RowError]  # where it is, for messages, and its columns

RESPONSE_IDS = (
    *("response_id", "sequence_id", "sample_id", "rollout_id", "completion_id", "request_id", "response_index"),
    *("sequence_index", "sample_index", "sequence", "sample", "seq", "seq_id", "id", "idx", "index", "row"),
)  # names of the column that says which response a token is of, perhaps of several ones of a prompt
PROMPT_IDS = ("uid", "prompt_id", "prompt_index", "group_id", "question_id", "problem_id")
POSITIONS = ("position", "pos", "token_index", "token_idx", "token_position", "token_pos", "position_id")
MOST_LEADING = 1_000  # rows that are looked at for the first one that is known
LONGEST_RESPONSE = 10_000_000  # tokens


def gathered(rows: Iterable[GivenRow], chosen: Mapping[str, str] | None = None) -> Iterator[GivenRow]:
    """The rows as they are, or, where a row is one token, one row for each response.

    The tokens of a response follow one another, in order or with their positions.

    Raises:
        StudyError: a response's tokens are in two places.
    """
    iterator = _unwrapped(rows, chosen)
    leading: list[GivenRow] = []
    known: Format | None = None
    for where, row in iterator:
        leading.append((where, row))
        if len(leading) >= MOST_LEADING:
            break
        if isinstance(row, RowError):
            continue
        try:
            known = recognise(row, where, chosen)
        except RowError:
            continue
        break
    everything = itertools.chain(leading, iterator)
    if known is None:
        yield from everything
        return
    first = leading[-1][1]
    assert isinstance(first, Mapping)
    sides = [first[known.columns[side]] for side in SIDES]
    is_token = any(map(is_scalar, sides)) and all(value is None or is_scalar(value) for value in sides)
    if is_token:
        ahead = list(itertools.islice(iterator, MOST_LEADING))
        everything = itertools.chain(leading, ahead, iterator)
        tokens = [row for _, row in (leading[-1], *ahead) if isinstance(row, Mapping)]
        response = response_columns(known, first, lambda name: _all_differ([one_line(row.get(name)) for row in tokens]))
        position = position_column(known, first)
        if response or position:
            yield from _responses(everything, known, response, position)
            return
    yield from everything


def _unwrapped(rows: Iterable[GivenRow], chosen: Mapping[str, str] | None) -> Iterator[GivenRow]:
    """The rows, and for one that has its columns under a name, what stands there beside the row's own columns."""
    for where, row in rows:
        inner = {} if isinstance(row, RowError) else {k: v for k, v in row.items() if isinstance(v, Mapping)}
        inner = {name: columns for name, columns in inner.items() if has_sides(columns, chosen)}
        if isinstance(row, RowError) or not inner or has_sides(row, chosen):
            yield where, row
            continue
        beside = {name: value for name, value in row.items() if name not in inner}
        for columns in inner.values():
            yield where, {**beside, **columns}


def _all_differ(values: list[str]) -> bool:
    return 1 < len(values) == len(set(values))


def response_columns(known: Format, columns: Container[Any], all_differ: Callable[[str], bool]) -> tuple[str, ...]:
    """The columns that together say which response a token is of; none if there are none.

    `all_differ` says whether each token has a value of its own in a column, which then numbers rows or tokens. A number
    of a response may count those of its prompt, so that the prompt's belongs to it.
    """
    named = known.columns.get("response")
    if named is not None and named in columns:
        return (named,)
    of_each = (_unused(names, known, columns, all_differ) for names in (PROMPT_IDS, RESPONSE_IDS))
    return tuple(name for name in of_each if name is not None)


def is_named(known: Format, response: tuple[str, ...]) -> bool:
    """Whether the format or the user names the column of the response, so that positions say nothing of it."""
    return response == (known.columns.get("response"),)


def position_column(known: Format, columns: Container[Any]) -> str | None:
    """The column with a token's place in its response; None if there is none."""
    return _unused(POSITIONS, known, columns)


def _unused(
    names: Iterable[str], known: Format, columns: Container[Any], rejects: Callable[[str], bool] = lambda _: False
) -> str | None:
    used = known.columns.values()
    return next((name for name in names if name in columns and name not in used and not rejects(name)), None)


def _responses(
    rows: Iterable[GivenRow], known: Format, response: tuple[str, ...], position: str | None
) -> Iterator[GivenRow]:
    """One row for each response. In an unnamed column's response no position stands twice."""
    lists = [name for role, name in known.columns.items() if role in (*PER_TOKEN, "mask")]
    ended: set[Any] = set()
    group: list[Mapping[str, Any]] = []
    key, place, where_first = None, -math.inf, ""
    places: set[float] = set()
    may_repeat = position is None or is_named(known, response)
    for where, row in rows:
        if isinstance(row, RowError):
            yield where, row
            continue
        of_row = (*(one_line(row.get(name)) for name in response), row.get(known.columns.get("step", "")))
        at = _position(row, position)
        begins = of_row != key or (not may_repeat and at in places) if response else at <= place
        if group and begins:
            yield where_first, _joined(group, lists, position)
            if of_row != key:
                ended.add(key)
            group = []
            places = set()
        if not group:
            if response and of_row in ended:
                shown = ", ".join(f"{name} {one_line(row.get(name))}" for name in response)
                raise DataError(
                    f"{where}: {shown} has tokens further above too; sort the rows by {' and '.join(response)}"
                )
            key, where_first = of_row, where
        group.append(row)
        place = at
        places.add(at)
        if len(group) > LONGEST_RESPONSE:
            raise DataError(f"{where}: one response has more than {LONGEST_RESPONSE:,} tokens")
    if group:
        yield where_first, _joined(group, lists, position)


def _position(row: Mapping[str, Any], position: str | None) -> float:
    try:
        return float(row[position]) if position else math.inf
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.inf


def _joined(group: list[Mapping[str, Any]], lists: list[str], position: str | None) -> dict[str, Any]:
    if position:
        group = sorted(group, key=lambda row: _position(row, position))
    return {name: [row.get(name) for row in group] if name in lists else value for name, value in group[0].items()}


def cell(text: str) -> Any:
    """A cell of a CSV: a number, a list that is written as JSON or by Python, nothing, or text."""
    stripped = text.strip()
    if not stripped:
        return None
    if is_json_list(stripped):
        try:
            return json_list(stripped)
        except (ValueError, RecursionError):
            return text
    try:
        return float(stripped)
    except ValueError:
        return text
