"""Logs in memory: a table of pandas or pyarrow, a dictionary of columns, rows, or paths of files."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tailrl.diagnosis.documents import of_columns
from tailrl.diagnosis.formats import check_columns, is_scalar, length_of, recognise
from tailrl.diagnosis.left_out import LeftOut, RowError
from tailrl.diagnosis.log import SIDES, Log
from tailrl.diagnosis.readers import in_parts, read_log, sequences
from tailrl.diagnosis.token_rows import GivenRow
from tailrl.runtime.errors import DataError, one_line


def read_table(
    table: Any, left_out: LeftOut | None = None, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Log]]:
    """A log in parts, each with the title of its format; raises StudyError for what is no log.

    Args:
        table: paths, rows, or a table.
        left_out: gets what was left out.
        columns: the table's names of columns, by ours.
    """
    left_out = LeftOut() if left_out is None else left_out
    columns = check_columns(columns) if columns else None
    paths = [table] if isinstance(table, str | os.PathLike) else table
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        yield from read_log([Path(path) for path in paths], left_out=left_out, columns=columns)
        return
    is_empty = True
    for title, part in in_parts(sequences(_rows(table, columns), "", left_out, columns), left_out):
        is_empty = False
        yield title, part
    if is_empty:
        for reason, sentence in left_out.first.items():
            raise RowError(reason, sentence)
        raise DataError("the table holds no sequence with a response")


def _rows(table: Any, columns: Mapping[str, str] | None) -> Iterator[GivenRow]:
    if isinstance(table, Mapping):
        yield from _of_mapping({str(name): values for name, values in table.items()}, columns)
        return
    for number, row in enumerate(_mappings(table)):
        where = f"row {number}"
        if isinstance(row, Mapping):
            # pandas has NaN where a column has no value.
            yield where, {str(name): None if _absent(value) else value for name, value in row.items()}
        else:
            says = f"is {type(row).__name__}, not a dictionary of columns: {one_line(row)}"
            yield where, RowError("they are no dictionaries", f"{where}: {says}")


def _of_mapping(table: Mapping[str, Any], columns: Mapping[str, str] | None) -> Iterator[GivenRow]:
    """Columns: lists of lists, rectangles, or one number a token with the response that it is of."""
    if not table:
        return
    known = recognise(table, "the table", columns)
    sides = {known.columns[side]: table[known.columns[side]] for side in SIDES}
    lengths = {name: length_of(values) for name, values in sides.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns differ in length: {lengths}")
    rows = list(of_columns(table, "the table", columns))
    (name, values), *_ = sides.items()
    if rows and rows[0][1] is table and (is_scalar(values) or (length_of(values) and is_scalar(values[0]))):
        raise DataError(
            f"the table: {name} has numbers and no lists; a row is one response, with a list of its tokens' numbers, "
            "or one token, with a column response_id"
        )
    yield from rows


def _mappings(table: Any) -> Iterable[Any]:
    if hasattr(table, "to_pylist"):  # pyarrow's tables and their batches
        return (row for start in range(0, len(table), 256) for row in table.slice(start, 256).to_pylist())
    if hasattr(table, "to_batches"):  # its datasets
        return (row for batch in table.to_batches(batch_size=256) for row in batch.to_pylist())
    if hasattr(table, "columns"):
        columns = [(name, table[name]) for name in table.columns]
        names = [name for name, _ in columns]
        return (dict(zip(names, values, strict=True)) for values in zip(*(c for _, c in columns), strict=True))
    if isinstance(table, Iterable):
        return table
    raise DataError(f"a log is a table, a dictionary of columns, rows or paths, not {type(table).__name__}")


def _absent(value: Any) -> bool:
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
