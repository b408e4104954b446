"""Reads the metrics of a W&B run from the file that wandb writes on this machine, `run-ID.wandb`.

The file is a log of records in blocks of 32 KiB, as LevelDB's log format has them, behind a header of 7 bytes. Each
record is a protobuf message, of which only the history is read here. So wandb need not be installed.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailrl.runtime.errors import DataError, reason

MAGIC = b":W&B"
FILE_HEADER_BYTES = 7  # the magic, 2 bytes, and a version
BLOCK_BYTES = 32768
CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # kinds of a chunk
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types

# Field numbers of wandb's messages.
RECORD_HISTORY = 2
HISTORY_ITEM, HISTORY_STEP = 1, 2
STEP_NUMBER = 1
ITEM_KEY, ITEM_NESTED_KEY, ITEM_BOOLEAN, ITEM_INTEGER, ITEM_NUMBER, ITEM_VALUE_JSON = 1, 2, 4, 5, 6, 16


def read_wandb_file(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's history: each a dictionary from a metric's name to its value, with `_step`.

    A last record that is cut off is left out: the run may still write.

    Raises:
        StudyError: the file is no W&B run, or cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from None
    if content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: is no file of a W&B run: it does not begin with {MAGIC.decode()}")
    try:
        for record in _records(content):
            for number, value in _fields(record):
                if number == RECORD_HISTORY and isinstance(value, bytes):
                    yield _history_row(value)
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"{path}: is damaged: {reason(error)}") from None


def _records(content: bytes) -> Iterator[bytes]:
    """The whole records of a file; what is cut off at its end is left out."""
    place, parts = FILE_HEADER_BYTES, bytearray()
    while place + CHUNK_HEADER.size <= len(content):
        left_in_block = BLOCK_BYTES - place % BLOCK_BYTES
        if left_in_block < CHUNK_HEADER.size:  # the rest of a block is padding
            place += left_in_block
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(content, place)
        place += CHUNK_HEADER.size
        if length > left_in_block - CHUNK_HEADER.size or not kind:
            if not any(content[place - CHUNK_HEADER.size :]):  # zeros: space that was never written
                return
            raise ValueError("a record has no known form")
        if place + length > len(content):
            return
        if kind in (FULL, FIRST):
            parts.clear()
        parts += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield bytes(parts)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """A protobuf message's fields, in order: number and value."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == VARINT:
            value, place = _varint(message, place)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            value, place = message[place : place + size], place + size
        elif kind == BYTES:
            size, place = _varint(message, place)
            if place + size > len(message):
                raise ValueError("a field is longer than its message")
            value, place = message[place : place + size], place + size
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        yield number, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """An integer in groups of seven bits, the lowest first, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place


def _history_row(message: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, value in _fields(message):
        if not isinstance(value, bytes):
            continue
        if number == HISTORY_ITEM:
            name, logged = _item(value)
            row[name] = logged
        elif number == HISTORY_STEP:
            row.setdefault("_step", next((step for key, step in _fields(value) if key == STEP_NUMBER), 0))
    return row


def _item(message: bytes) -> tuple[str, Any]:
    """A metric's name, its nested keys joined by slashes, and its value; None for what is no JSON."""
    names: list[str] = []
    logged: Any = None
    for number, value in _fields(message):
        if number in (ITEM_KEY, ITEM_NESTED_KEY) and isinstance(value, bytes):
            names.append(value.decode("utf-8", "replace"))
        elif number == ITEM_VALUE_JSON and isinstance(value, bytes):
            try:
                logged = json.loads(value)
            except ValueError:
                logged = None
        elif number == ITEM_NUMBER and isinstance(value, bytes):
            logged = struct.unpack("<d", value)[0]
        elif number in (ITEM_INTEGER, ITEM_BOOLEAN) and isinstance(value, int):
            logged = value - (1 << 64) if value >= 1 << 63 else value
    return "/".join(names), logged
