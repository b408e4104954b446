"""Logs in memory: a table of pandas or pyarrow, a dictionary of columns, rows, or paths of files."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import GivenRow, in_parts, read_log, sequences
from tailrl.runtime.errors import StudyError, one_line


def read_table(table: Any) -> Iterator[tuple[str, Log]]:
    """A log in parts, each with the title of its format; raises StudyError for what is no log."""
    paths = [table] if isinstance(table, str | os.PathLike) else table
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        yield from read_log([Path(path) for path in paths])
        return
    found = False
    for title, part in in_parts(sequences(_rows(table))):
        found = True
        yield title, part
    if not found:
        raise StudyError("the table holds no sequence with a response")


def _rows(table: Any) -> Iterator[GivenRow]:
    for number, given in enumerate(_mappings(table)):
        if not isinstance(given, Mapping):
            raise StudyError(f"row {number}: is {type(given).__name__}, not a dictionary of columns: {one_line(given)}")
        # pandas has NaN where a column has no value.
        yield f"row {number}", {str(name): None if _absent(value) else value for name, value in given.items()}


def _mappings(table: Any) -> Iterable[Any]:
    if hasattr(table, "to_pylist"):  # pyarrow's tables and their batches
        return (given for start in range(0, len(table), 256) for given in table.slice(start, 256).to_pylist())
    if hasattr(table, "to_batches"):  # its datasets
        return (given for batch in table.to_batches(batch_size=256) for given in batch.to_pylist())
    if isinstance(table, Mapping) or hasattr(table, "columns"):
        columns = {name: table[name] for name in (table if isinstance(table, Mapping) else table.columns)}
        single = [str(name) for name, values in columns.items() if not hasattr(values, "__len__")]
        if single:
            raise StudyError(f"the column {one_line(single[0])} holds one value, not one for each row")
        lengths = {str(name): len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise StudyError(f"the columns differ in length: {lengths}")
        return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    if isinstance(table, Iterable):
        return table
    raise StudyError(f"a log is a table, a dictionary of columns, rows or paths, not {type(table).__name__}")


def _absent(value: Any) -> bool:
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
