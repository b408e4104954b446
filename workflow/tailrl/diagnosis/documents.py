"""Whole documents, as JSON texts, dumps of torch and npz files are: their rows, or their columns as rows."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.diagnosis.columns import numbers
from tailrl.diagnosis.formats import PER_TOKEN, has_sides, length_of, recognise
from tailrl.diagnosis.left_out import RowError
from tailrl.diagnosis.token_rows import GivenRow, is_named, position_column, response_columns
from tailrl.runtime.errors import DataError, one_line

STEP_NAME = r"(?i)[a-z_ ]*step\D?(\d{1,15})"  # of a batch in a document


def rows_of_document(document: Any, where: str, chosen: Mapping[str, str] | None = None) -> Iterator[GivenRow]:
    """The rows of a whole JSON text or of an unpickled dump: a list of rows, or columns, or either under a name.

    Under a name other than a column's, the numbers and texts beside it belong to every row, as slime's rollout_id.

    Raises:
        RowError: it holds neither.
        StudyError: each response was cut into parts.
    """
    if isinstance(document, Mapping):
        yield from _of_mapping(_of_pandas(document, chosen), where, chosen)
        return
    if not isinstance(document, list | tuple):
        says = f"holds {type(document).__name__}, not rows or columns"
        raise RowError("it holds no rows and no columns", f"{where}: {says}")
    if not document:
        return
    if not any(isinstance(row, Mapping) for row in document):
        says = f"holds a list of {type(document[0]).__name__}, not of rows"
        raise RowError("it holds no rows and no columns", f"{where}: {says}")
    for number, row in enumerate(document):
        place = f"{where}, row {number}"
        if isinstance(row, Mapping):
            yield place, row
        else:
            says = f"holds {type(row).__name__}, not a JSON object"
            yield place, RowError("they are no JSON objects", f"{place}: {says}")


def _of_mapping(document: Mapping[Any, Any], where: str, chosen: Mapping[str, str] | None) -> Iterator[GivenRow]:
    if has_sides(document, chosen):
        yield from of_columns(document, where, chosen)
        return
    shared = {name: value for name, value in document.items() if isinstance(value, str | int | float)}
    if str(shared.get("cp_size", 1)) != "1":
        raise DataError(f"{where}: has a part of each response, for context parallelism cut them; log without it")
    named = {name: inner for name, inner in document.items() if isinstance(inner, Mapping) and has_sides(inner, chosen)}
    for name, inner in named.items():
        digits = re.fullmatch(STEP_NAME, str(name))
        step = {"step": int(digits[1])} if digits else {}
        place = f"{where}, {one_line(name)}" if len(named) > 1 else where
        yield from of_columns({**step, **shared, **inner}, place, chosen)
    if named:
        return
    for inner in document.values():
        if isinstance(inner, list | tuple) and inner and all(isinstance(row, Mapping) for row in inner):
            for number, row in enumerate(inner):
                yield f"{where}, sample {number}", {**shared, **row}
            return
    recognise(map(str, document), where, chosen)  # which says what is missing


def _of_pandas(document: Mapping[Any, Any], chosen: Mapping[str, str] | None) -> Mapping[Any, Any]:
    """Columns from what pandas writes: `{column: {index: value}}`, or columns, index and data apart."""
    names, data = document.get("columns"), document.get("data")
    if isinstance(names, list) and isinstance(data, list):
        is_table = all(isinstance(row, list) and len(row) == len(names) for row in data)
        if is_table:
            return {str(name): [row[place] for row in data] for place, name in enumerate(names)}
    columns = [column for column in document.values() if isinstance(column, Mapping)]
    if not columns or not columns[0] or len(columns) < len(document) or has_sides(columns[0], chosen):
        return document
    if any(list(column) != list(columns[0]) for column in columns):
        return document
    return {name: list(column.values()) for name, column in document.items()}


def of_columns(document: Mapping[Any, Any], where: str, chosen: Mapping[str, str] | None) -> Iterator[GivenRow]:
    """Columns as one row, which may be a rectangle, or with one number a token as a row for each response."""
    known = recognise(document, where, chosen)
    sampler = document[known.columns["sampler"]]
    count = length_of(sampler)
    columns = {name: values for name, values in document.items() if length_of(values) == count}
    response = response_columns(known, columns, lambda name: count > 1 and _all_differ(_array(columns[name])))
    position = position_column(known, columns)
    if not _is_flat(sampler) or not (response or position):
        yield where, document
        return
    columns = {name: _array(values) for name, values in columns.items()}
    steps = known.columns.get("step")
    keys = [_codes(columns[name]) for name in (*response, steps) if response and name in columns]
    if not keys or (position and not is_named(known, response) and not _all_differ(columns[position], *keys)):
        keys.append(_starts(columns[position]))
    lists = {name for role, name in known.columns.items() if role in (*PER_TOKEN, "mask")}
    for number, places in enumerate(_groups(keys)):
        row = {name: values[places] if name in lists else values[places[0]] for name, values in columns.items()}
        yield f"{where}, response {number}", {**document, **row}


def _is_flat(values: Any) -> bool:
    """Whether these are numbers, and more than one."""
    count = length_of(values)
    return count > 1 and all(not length_of(values[place]) and values[place] is not None for place in (0, count - 1))


def _array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _codes(values: NDArray[Any]) -> NDArray[Any]:
    """A number for each value, equal for equal ones."""
    numeric = values if values.dtype.kind in "biuf" else values.astype(str)
    codes: NDArray[Any] = np.unique(numeric, return_inverse=True)[1].reshape(-1)
    return codes


def _all_differ(*columns: NDArray[Any]) -> bool:
    """Whether no two places have the same values in all columns."""
    codes = np.stack([_codes(values) for values in columns])
    return bool(np.unique(codes, axis=1).shape[1] == codes.shape[1])


def _starts(positions: NDArray[Any]) -> NDArray[Any]:
    """The number of the response of each token, which begins where the position does not rise."""
    starts: NDArray[Any] = np.cumsum(np.diff(numbers(positions), prepend=np.inf) <= 0)
    return starts


def _groups(keys: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """The places of the tokens of each response, in the order in which the responses begin."""
    code_T = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    order_T = np.argsort(code_T, kind="stable")
    groups = np.split(order_T, np.cumsum(np.bincount(code_T))[:-1])
    return sorted(groups, key=lambda places: int(places[0]))
