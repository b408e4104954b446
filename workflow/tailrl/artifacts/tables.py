"""CSV tables: the only reader and writer of these files."""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tailrl.artifacts.files import read_bytes, read_text
from tailrl.runtime.errors import DataError, reason

Row = Mapping[str, object]
RecordT = TypeVar("RecordT")

FROM_CELL: dict[Any, Callable[[str], object]] = {
    str: str,
    int: int,
    float: lambda cell: float(cell or "nan"),
    bool: lambda cell: cell == "True",
}
"""What makes a field's value of a cell, by the field's type."""


def flat_rows(records: Iterable[object]) -> list[Row]:
    """Records as CSV rows, nested fields as columns `outer_inner`; raises ValueError if two fields give one column."""
    rows: list[Row] = []
    for record in records:
        row: dict[str, object] = {}
        for key, value in asdict(record).items():  # type: ignore[call-overload]
            cells = {f"{key}_{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
            if twice := row.keys() & cells.keys():
                raise ValueError(f"two fields of {type(record).__name__} give the column {min(twice)}")
            row |= cells
        rows.append(row)
    return rows


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with the same columns: floats with 9 digits, NaN as an empty cell; without rows, a bare header.

    A name that ends in .gz is compressed, without the time, so that equal rows are equal bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{key: _cell(value) for key, value in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _cell(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else format(value, ".9g")


def read_csv(path: Path, columns: Iterable[str] = ()) -> list[dict[str, str]]:
    """A table's rows, as text. A name that ends in .gz is decompressed.

    Raises StudyError if a row lacks one of the columns, or has surplus cells.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(_text(path), newline="")))
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read as CSV: {reason(error)}") from None
    for row in rows:
        missing = [name for name in columns if row.get(name) is None]
        if missing:
            raise DataError(f"{path}: a line has no {missing[0]}")
        if None in row:
            raise DataError(f"{path}: a line has more cells than the header")
    return rows


def records_of(rows: Iterable[Mapping[str, str]], kind: type[RecordT]) -> list[RecordT]:
    """The dataclasses that `flat_rows` made rows of; an empty cell of a number is NaN. Other columns are left out.

    A field with a default may have no column: a table of before has not what came later. Raises StudyError if another
    column is missing, or a cell is not of its field's kind.
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


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path)
    try:
        return gzip.decompress(read_bytes(path)).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        raise DataError(f"{path}: cannot be read as a gzip file of text") from None
