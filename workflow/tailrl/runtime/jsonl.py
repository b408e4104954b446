"""JSON texts, and lines of JSONL: the one rule for where a line ends."""

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

from tailrl.runtime.errors import DataError
from tailrl.runtime.limits import MOST_EMPTY_LINES


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def numbered_lines(
    opened: io.BufferedIOBase, source: object, longest: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """The lines that hold text, each with its number from 1, and with its line feed where it has one.

    A line ends at a line feed alone: a text may hold U+2028 and other characters at which `str.splitlines` breaks.
    A byte order mark at the start is dropped.

    Args:
        opened: a file opened for reading bytes; a line is read when it is asked for.
        source: names the file in messages.
        longest: bytes; None: any length.

    Raises:
        StudyError: a line has `longest` bytes or more, or there are more than MOST_EMPTY_LINES empty ones.
    """
    number, empty = 0, 0
    while line := opened.readline(-1 if longest is None else longest):
        number += 1
        if len(line) == longest:
            raise DataError(f"{source}, line {number}: is longer than {longest:,} bytes")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line
            continue
        empty += 1
        if empty > MOST_EMPTY_LINES:
            raise DataError(f"{source}: has more than {MOST_EMPTY_LINES} empty lines")
