"""The records that a study's tables were made of, again from their rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from tailrl.runtime.errors import DataError

RecordT = TypeVar("RecordT")

FROM_CELL: dict[Any, Callable[[str], object]] = {
    str: str,
    int: int,
    float: lambda cell: float(cell or "nan"),
    bool: lambda cell: cell == "True",
}
"""What makes a field's value of a cell, by the field's type."""


def records_of(rows: Iterable[Mapping[str, str]], kind: type[RecordT]) -> list[RecordT]:
    """The dataclasses that `artifacts.tables.flat_rows` made rows of; other columns are left out.

    An empty cell of a number is NaN. A field with a default may have no column: a table of before has not what came
    later. Raises StudyError if another column is missing, or a cell is not of its field's kind.
    """
    return [_record(row, kind, "") for row in rows]


def _record(row: Mapping[str, str], kind: type[RecordT], prefix: str) -> RecordT:
    values: dict[str, Any] = {}
    defaults = {one.name for one in fields(kind) if one.default is not MISSING}  # type: ignore[arg-type]
    for name, hint in get_type_hints(kind).items():
        if isinstance(hint, type) and is_dataclass(hint):
            values[name] = _record(row, hint, f"{prefix}{name}_")
            continue
        cell = row.get(f"{prefix}{name}")
        if cell is None and name in defaults:
            continue
        if cell is None:
            raise DataError(f"a row of {kind.__name__} has no {prefix}{name}")
        try:
            values[name] = FROM_CELL[hint](cell)
        except ValueError:
            raise DataError(f"{prefix}{name} of a row of {kind.__name__} is {cell!r}") from None
    return kind(**values)
