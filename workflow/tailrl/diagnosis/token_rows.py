"""Tables with a token a row, as CSV has them: the rows of a response become one."""

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from tailrl.diagnosis.columns import is_json_list, json_list
from tailrl.diagnosis.formats import PER_TOKEN, SIDES, Format, is_scalar, recognise
from tailrl.diagnosis.left_out import RowError
from tailrl.runtime.errors import StudyError, one_line

GivenRow = tuple[str, Mapping[str, Any] | RowError]  # where it is, for messages, and its columns

RESPONSE_IDS = (
    *("response_id", "sequence_id", "sample_id", "rollout_id", "completion_id", "request_id", "uid", "response_index"),
    *("sequence_index", "sample_index", "sequence", "sample", "seq", "seq_id", "id", "idx", "index", "row"),
)  # names of the column that says which response a token is of
POSITIONS = ("position", "pos", "token_index", "token_position", "position_id")
MOST_LEADING = 1_000  # rows that are looked at for the first one that is known
LONGEST_RESPONSE = 10_000_000  # tokens


def gathered(rows: Iterable[GivenRow], chosen: Mapping[str, str] | None = None) -> Iterator[GivenRow]:
    """The rows as they are, or, where a row is one token, one row for each response.

    The tokens of a response follow one another, in order or with their positions.

    Raises:
        StudyError: a response's tokens are in two places.
    """
    iterator = iter(rows)
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
    response = response_column(known, first)
    position = position_column(known, first)
    sides = [first[known.columns[side]] for side in SIDES]
    is_token = any(map(is_scalar, sides)) and all(value is None or is_scalar(value) for value in sides)
    if is_token and (response or position):
        yield from _responses(everything, known, response, position)
    else:
        yield from everything


def response_column(known: Format, columns: Container[Any]) -> str | None:
    """The column that says which response a token is of; None if there is none."""
    named = known.columns.get("response")
    return named if named in columns else _unused(RESPONSE_IDS, known, columns)


def position_column(known: Format, columns: Container[Any]) -> str | None:
    """The column with a token's place in its response; None if there is none."""
    return _unused(POSITIONS, known, columns)


def _unused(names: Iterable[str], known: Format, columns: Container[Any]) -> str | None:
    used = known.columns.values()
    return next((name for name in names if name in columns and name not in used), None)


def _responses(
    rows: Iterable[GivenRow], known: Format, response: str | None, position: str | None
) -> Iterator[GivenRow]:
    lists = [name for role, name in known.columns.items() if role in (*PER_TOKEN, "mask")]
    ended: set[Any] = set()
    group: list[Mapping[str, Any]] = []
    key, place, where_first = None, -math.inf, ""
    for where, row in rows:
        if isinstance(row, RowError):
            yield where, row
            continue
        of_row = (one_line(row.get(response)), row.get(known.columns.get("step", ""))) if response else None
        at = _position(row, position)
        if group and (of_row != key if response else at <= place):
            yield where_first, _joined(group, lists, position)
            ended.add(key)
            group = []
        if not group:
            if response and of_row in ended:
                raise StudyError(
                    f"{where}: {response} {one_line(row[response])} has tokens further above too; "
                    f"sort the rows by {response}"
                )
            key, where_first = of_row, where
        group.append(row)
        place = at
        if len(group) > LONGEST_RESPONSE:
            raise StudyError(f"{where}: one response has more than {LONGEST_RESPONSE:,} tokens")
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
