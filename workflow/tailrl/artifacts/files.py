"""Reads bytes, text, JSON and records from files. Bad input raises StudyError, one sentence that names the file."""

import io
import json
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from tailrl.config.messages import sentences
from tailrl.runtime.errors import DataError, StorageError, one_line, reason
from tailrl.runtime.jsonl import numbered_lines
from tailrl.runtime.limits import regular


class Record(BaseModel):
    """A file of results, or a part of one: unknown names are refused, and no value is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


RecordT = TypeVar("RecordT", bound=Record)


def read_bytes(path: Path) -> bytes:
    """A file's content; raises StudyError if it is missing or cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except FileNotFoundError:
        raise StorageError(f"{path}: is missing") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {reason(error)}") from None


def read_text(path: Path) -> str:
    """A file's text; raises StudyError if it is missing, cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(f"{path}: cannot be read: {reason(error)}") from None


def parse_object(text: str | bytes, where: object) -> dict[str, Any]:
    """The object in a JSON text; raises StudyError, which names `where`, for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not valid JSON") from None
    if not isinstance(data, dict):
        raise DataError(f"{where}: holds {type(data).__name__}, not a JSON object")
    return data


def parse_record(kind: type[RecordT], text: str | bytes, where: object) -> RecordT:
    """A record from JSON text; raises StudyError, which names `where` and the wrong fields."""
    try:
        return kind.model_validate(parse_object(text, where))
    except ValidationError as error:
        raise DataError(f"{where}: {one_line(sentences(error, kind))}") from None


def parse_lines(kind: type[RecordT], data: bytes, path: Path) -> list[RecordT]:
    """The records of a file with one a line, at least one; raises StudyError, which names the line."""
    lines = numbered_lines(io.BytesIO(data), path)
    found = [parse_record(kind, line, f"{path}, line {number}") for number, line in lines]
    if not found:
        raise DataError(f"{path}: holds no line")
    return found


def parse_arrays(data: bytes, names: Iterable[str], path: Path) -> dict[str, NDArray[Any]]:
    """Numeric arrays of one length, by name, from an npz file's content; raises StudyError, which names the file."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            arrays = {} if missing else {name: file[name] for name in names}
    except MemoryError:  # or a header lies about lengths
        raise DataError(f"{path}: its arrays take too much memory to read") from None
    # RuntimeError: an encrypted file or a zip of another version.
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        raise DataError(f"{path}: cannot be read as an npz file of arrays") from None
    if missing:
        raise DataError(f"{path}: has no {missing[0]}")
    if any(array.dtype.kind not in "biuf" or not array.ndim for array in arrays.values()):
        raise DataError(f"{path}: its arrays do not hold numbers")
    lengths = sorted({len(array) for array in arrays.values()})
    if len(lengths) != 1 or not lengths[0]:
        raise DataError(f"{path}: its arrays hold {', '.join(map(str, lengths))} numbers")
    return arrays
