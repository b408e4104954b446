"""CSV tables: the only reader and writer of these files."""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from tailrl.artifacts.files import read_bytes, read_text
from tailrl.runtime.errors import DataError, reason

Row = Mapping[str, object]


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


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path)
    try:
        return gzip.decompress(read_bytes(path)).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        raise DataError(f"{path}: cannot be read as a gzip file of text") from None
