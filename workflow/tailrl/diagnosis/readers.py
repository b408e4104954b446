"""Logs of any framework in parts, from files and folders as they are: JSON, Parquet, Arrow, CSV, npz and `.pt`.

What a file holds is told by its first bytes, and by its ending where these do not say.
"""

import csv
import itertools
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.diagnosis.documents import rows_of_document
from tailrl.diagnosis.folders import log_files, of_folder
from tailrl.diagnosis.formats import MOST_LABELS, ROLES, Format, formats, has_sides, recognise, row_of, rows_of
from tailrl.diagnosis.left_out import DamagedError, LeftOut, RowError
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.diagnosis.opened import MOST_BLANK, Opened, opened, seekable
from tailrl.diagnosis.pickles import load_torch, refuse_pickle
from tailrl.diagnosis.token_rows import POSITIONS, PROMPT_IDS, RESPONSE_IDS, GivenRow, cell, gathered
from tailrl.runtime.errors import DataError, StorageError, StudyError, reason
from tailrl.runtime.jsonl import json_value, numbered_lines
from tailrl.runtime.limits import in_limited_memory, out_of_memory

MEMORY = 1.5e9  # bytes that reading a file may take, besides Python and its libraries
CHUNK = 200_000  # tokens that a part of a log holds, or one longer sequence
SEQUENCES_A_PART = 20_000  # each takes a kilobyte besides its tokens
NUMBERS_AT_ONCE = 1_000_000  # of a column of Parquet or Arrow: Python takes 32 bytes for each
TOKENS_OF_ANY_FILE, MOST_TOKENS_A_BYTE = 1_000_000, 100
"""Two log-probs of a token take several bytes in a log, compressed too; equal numbers take none."""

MOST_TOKENS_A_SEQUENCE = 10_000_000  # more than any model reads
MOST_BYTES_A_LINE = 256_000_000  # of JSONL: a sequence of some million tokens
MOST_BYTES_WHOLE = 256_000_000  # of what is read in one piece: a JSON text, or a compressed file of arrays
MOST_BAD_ROWS = 10_000  # before the first good one; then a file is no log

Seen = Callable[[float], object]  # is told each time how many more bytes of a file were read
Columns = Mapping[str, str] | None  # names that the user gave, our name to the file's


def read_log(
    paths: Sequence[Path], seen: Seen = float, left_out: LeftOut | None = None, columns: Columns = None
) -> Iterator[tuple[str, Log]]:
    """The logs in these files and folders, in parts of about CHUNK tokens, each with the title of its format.

    Args:
        paths: of a folder all files are looked at, sorted by name. What is no log is left out.
        seen: is told how many bytes were read.
        left_out: gets what was left out.
        columns: the file's names of columns, by ours; those that are not here are known names.

    Raises:
        StudyError: a path is missing, or no file holds a sequence that can be read: the first reason, or whose folder
            it looks like.
    """
    left_out = LeftOut() if left_out is None else left_out
    files = log_files(paths, left_out)
    most_times = Counter[bytes]() if len(files) > 1 else None
    any_tokens = False
    for file in files:
        tokens = 0
        try:
            for title, part in _read_file(file, seen, left_out, columns, most_times):
                tokens += len(part.sampler_T)
                any_tokens = True
                yield title, part
        except DamagedError as error:
            if tokens:
                left_out.damaged.append(str(error))
            else:
                left_out.files[file] = error
        except (DataError, StorageError) as error:
            if tokens:
                raise
            left_out.files[file] = error
    if not any_tokens:
        raise of_folder(paths, left_out)


def read_with_progress(
    paths: Sequence[Path], left_out: LeftOut | None = None, columns: Columns = None
) -> Iterator[tuple[str, Log]]:
    """The same as `read_log`, with a bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    total = sum(file.stat().st_size for file in log_files(paths, LeftOut()) if file.exists())
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        yield from read_log(paths, lambda size: progress.advance(task, size), left_out, columns)


def _read_file(
    file: Path, seen: Seen, left_out: LeftOut, columns: Columns, most_times: Counter[bytes] | None
) -> Iterator[tuple[str, Log]]:
    tokens, size = 0, file.stat().st_size
    of_file = LeftOut()
    rows = in_limited_memory(_sequences_of(file, seen, of_file, columns), MEMORY, str(file))
    if most_times is not None:
        rows = _without_copies(rows, file, most_times, left_out)
    try:
        for title, part in in_parts(rows, of_file):
            tokens += len(part.sampler_T)
            if tokens > max(TOKENS_OF_ANY_FILE, MOST_TOKENS_A_BYTE * size):
                raise DataError(f"{file}: has more than {tokens:,} tokens in {size:,} bytes, as no log of a model has")
            yield title, part
    finally:
        if tokens:
            left_out.add(of_file)
    if not tokens and not left_out.copied[file]:
        raise of_file.only_reason(file)


def _without_copies(
    rows: Iterable[tuple[str, LoggedRow]], file: Path, most_times: Counter[bytes], left_out: LeftOut
) -> Iterator[tuple[str, LoggedRow]]:
    """The rows of a file that no earlier one has; the others are counted. Files of several ranks may hold the same.

    `most_times`: the most that one file has a response.
    """
    in_file = Counter[bytes]()
    for title, row in rows:
        in_file[row.digest] += 1
        if in_file[row.digest] > most_times[row.digest]:
            most_times[row.digest] = in_file[row.digest]
            yield title, row
        elif len(row.sampler_T):
            left_out.copied[file] += 1


def in_parts(rows: Iterable[tuple[str, LoggedRow]], left_out: LeftOut) -> Iterator[tuple[str, Log]]:
    """Sequences, each with the title of its format, as parts of about CHUNK tokens; empty ones are left out.

    A sequence of another format begins a new part. What was read before an error comes before it.
    """
    kept: list[LoggedRow] = []
    title, size = "", 0
    failure: StudyError | None = None
    try:
        for row_title, row in rows:
            if not len(row.sampler_T):
                left_out.empty += 1
                continue
            if kept and (row_title != title or size >= CHUNK or len(kept) >= SEQUENCES_A_PART):
                yield title, pack(kept)
                kept, size = [], 0
            title = row_title
            kept.append(row)
            size += len(row.sampler_T)
    except DamagedError as error:
        failure = error
    if kept:
        yield title, pack(kept)
    if failure is not None:
        raise failure


def sequences(
    rows: Iterable[GivenRow], file_name: str = "", left_out: LeftOut | None = None, columns: Columns = None
) -> Iterator[tuple[str, LoggedRow]]:
    """The sequences of rows, each with the title of its format; what cannot be read is counted in `left_out`.

    `file_name`: it may have the step.

    Raises:
        StudyError: none of the first MOST_BAD_ROWS rows can be read.
    """
    left_out = LeftOut() if left_out is None else left_out
    known_by_names: dict[frozenset[str], Format] = {}
    good = 0
    for where, row in gathered(rows, columns):
        try:
            if isinstance(row, RowError):
                raise row
            names = frozenset(row)
            if names not in known_by_names:
                if len(known_by_names) >= MOST_BAD_ROWS:
                    known_by_names.clear()
                known_by_names[names] = recognise(names, where, columns)
            known = known_by_names[names]
            lines = list(rows_of(row, known, where))
        except RowError as error:
            left_out.row(error)
            lines = []
        for number, line in enumerate(lines):
            place = f"{where}, sequence {number}" if number else where
            try:
                sequence = row_of(line, known, place, _step_of(file_name, known), left_out.notes)
            except RowError as error:
                left_out.row(error)
                continue
            left_out.rows += 1
            if sequence is None:
                continue
            if len(sequence.sampler_T) > MOST_TOKENS_A_SEQUENCE:
                raise DataError(
                    f"{place}: has {len(sequence.sampler_T):,} tokens, more than {MOST_TOKENS_A_SEQUENCE:,}"
                )
            good += 1
            yield known.title, sequence
        if not good and sum(left_out.reasons.values()) >= MOST_BAD_ROWS:
            raise DataError(next(iter(left_out.first.values())))


def _step_of(file_name: str, known: Format) -> float:
    step = re.search(known.step_in_name, file_name) if known.step_in_name else None
    return float(step[1]) if step else np.nan


def step_in_name(file_name: str) -> float:
    """The step that a file's name has, as in NeMo-RL's logs; NaN where it has none."""
    steps = (_step_of(file_name, known) for known in formats().values())
    return next((step for step in steps if not np.isnan(step)), np.nan)


# --- kinds of files ------------------------------------------------------------------------------------


def _sequences_of(file: Path, seen: Seen, left_out: LeftOut, columns: Columns) -> Iterator[tuple[str, LoggedRow]]:
    with opened(file) as content:
        if content.kind == "pickle":
            raise refuse_pickle(content.stream, file)
        if content.kind not in READERS:
            what = UNREAD.get(content.kind, f"it is neither {KNOWN_KINDS}")
            raise DataError(f"{file}: is no log that can be read: {what}")
        yield from sequences(READERS[content.kind](content, file, seen, columns), file.name, left_out, columns)


def _json(content: Opened, file: Path, seen: Seen, columns: Columns) -> Iterator[GivenRow]:
    """One row a line, or one JSON text: a list of rows, columns, or either of them under a name."""
    _, line = next(numbered_lines(content.stream, file, MOST_BYTES_A_LINE), (0, b""))
    first = json_value(line)
    if isinstance(first, dict):
        document = None if content.stream.read(MOST_BLANK).strip() else first
    else:
        text = line + content.stream.read(MOST_BYTES_WHOLE)
        document = json_value(text)
        if document is None and len(text) > MOST_BYTES_WHOLE and line.startswith(b"["):
            raise DataError(f"{file}: is one JSON text of more than {MOST_BYTES_WHOLE:,} bytes; write a row a line")
        del text
    if isinstance(document, dict) or (isinstance(document, list) and any(isinstance(row, dict) for row in document)):
        yield from rows_of_document(document, str(file), columns)
        seen(file.stat().st_size)
        return
    del document
    with opened(file) as again:
        yield from _lines(again, file, seen)


def _lines(content: Opened, file: Path, seen: Seen) -> Iterator[GivenRow]:
    place = 0
    for number, line in numbered_lines(content.stream, file, MOST_BYTES_A_LINE):
        seen(content.raw.tell() - place)
        place = content.raw.tell()
        where = f"{file}, line {number}"
        row = json_value(line)
        if isinstance(row, dict):
            yield where, row
        elif row is None and number > 1 and not line.endswith(b"\n"):
            cut = "is cut off: the file is still being written, or its writer was stopped"
            yield where, RowError(f"the last line {cut}", f"{where}: {cut}")
        elif row is None:
            yield where, RowError("they are not valid JSON", f"{where}: not valid JSON")
        else:
            sentence = f"{where}: holds {type(row).__name__}, not a JSON object"
            yield where, RowError("they are no JSON objects", sentence)


def _csv(content: Opened, file: Path, seen: Seen, columns: Columns) -> Iterator[GivenRow]:
    """A token a row with a column that says which response it is of, or a response a row with lists in cells."""
    csv.field_size_limit(MOST_BYTES_A_LINE)
    place = 0

    def text_lines() -> Iterator[str]:
        nonlocal place
        for _, line in numbered_lines(content.stream, file, MOST_BYTES_A_LINE):
            seen(content.raw.tell() - place)
            place = content.raw.tell()
            yield line.decode("utf-8", "replace")

    lines = text_lines()
    header_line = next(lines, "")
    delimiter = max(",;\t", key=header_line.count)
    reader = csv.reader(itertools.chain([header_line], lines), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader, [])]
        recognise(header, f"{file}, line 1", columns)
        for cells in reader:
            where = f"{file}, line {reader.line_num}"
            if len(cells) != len(header):
                words = f"{where}: has {len(cells)} cells, and the header {len(header)}"
                yield where, RowError("they have more or fewer cells than the header", words)
            else:
                yield where, dict(zip(header, map(cell, cells), strict=True))
    except csv.Error as error:
        raise DamagedError(f"{file}, line {reader.line_num}: cannot be read: {reason(error)}") from None


def _parquet(content: Opened, file: Path, seen: Seen, columns: Columns) -> Iterator[GivenRow]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with (
        _arrow_errors(file),
        pyarrow.parquet.ParquetFile(
            seekable(content, file, MOST_BYTES_WHOLE), pre_buffer=False, buffer_size=1_000_000
        ) as parquet,
    ):
        wanted = _wanted_fields(parquet.schema_arrow, file, columns)
        at_once = _rows_at_once(parquet.metadata)
        # Without threads, whose stacks would count as memory.
        batches = parquet.iter_batches(at_once, columns=wanted, use_threads=False)
        yield from _rows_of_batches(batches, file, seen, parquet.metadata.num_rows)


def _arrow(content: Opened, file: Path, seen: Seen, columns: Columns) -> Iterator[GivenRow]:
    """Arrow's file format, which Feather is too, and its streaming format, as the library datasets writes."""
    import pyarrow.ipc  # type: ignore[import-untyped]

    is_stream = content.kind == "arrow_stream"
    source = content.stream if is_stream else seekable(content, file, MOST_BYTES_WHOLE)
    with _arrow_errors(file), (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(source) as reader:
        wanted = _wanted_fields(reader.schema, file, columns)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from _rows_of_batches(_pieces(batch.select(wanted) for batch in batches), file, seen)


@contextmanager
def _arrow_errors(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except MemoryError:  # pyarrow's own is an ArrowException too
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if out_of_memory(error):
            raise MemoryError(str(error)) from None
        raise DamagedError(f"{file}: cannot be read: {reason(error)}") from None


def _wanted(names: Sequence[str], file: Path, columns: Columns) -> list[str]:
    """The columns that are read: a log may hold images and whole conversations beside."""
    known = recognise(names, str(file), columns)
    wanted = {*known.columns.values(), *PROMPT_IDS, *RESPONSE_IDS, *POSITIONS}
    return [name for name in dict.fromkeys(names) if name in wanted]


def _wanted_fields(schema: Any, file: Path, columns: Columns) -> list[str]:
    """The columns that are read, and those of words and whole numbers, by which rows may be grouped."""
    from pyarrow import types

    inner = {field.name: [one.name for one in field.type] for field in schema if types.is_struct(field.type)}
    inner = {name: names for name, names in inner.items() if has_sides(dict.fromkeys(names), columns)}
    is_inner = inner and not has_sides(dict.fromkeys(schema.names), columns)
    wanted = {*inner, *ROLES} if is_inner else set(_wanted(schema.names, file, columns))
    kinds = (types.is_integer, types.is_string, types.is_large_string, types.is_dictionary)
    labels = [field.name for field in schema if any(is_kind(field.type) for is_kind in kinds)]
    wanted |= set(labels[:MOST_LABELS])
    return [name for name in dict.fromkeys(schema.names) if name in wanted]


def _pieces(batches: Iterable[Any]) -> Iterator[Any]:
    """Record batches in pieces of about NUMBERS_AT_ONCE numbers."""
    for batch in batches:
        batch.validate(full=True)  # offsets that lie would be followed out of memory
        bytes_a_row = batch.nbytes / max(batch.num_rows, 1)
        at_once = max(1, min(256, int(8 * NUMBERS_AT_ONCE / max(bytes_a_row, 1))))
        for start in range(0, batch.num_rows, at_once):
            yield batch.slice(start, at_once)


def _rows_of_batches(batches: Iterable[Any], file: Path, seen: Seen, rows: int = 0) -> Iterator[GivenRow]:
    number, size = 0, file.stat().st_size
    for batch in batches:
        seen(batch.num_rows * size / rows if rows else 0)
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row
    if not rows:
        seen(size)


def _rows_at_once(metadata: Any) -> int:
    """Rows whose longest column has about NUMBERS_AT_ONCE numbers, from 1 to 256: a small file may hold long rows."""
    numbers_a_row = [
        group.column(column).num_values / max(group.num_rows, 1)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for column in range(group.num_columns)
    ]
    return max(1, min(256, int(NUMBERS_AT_ONCE / max([1.0, *numbers_a_row]))))


def _torch(content: Opened, file: Path, seen: Seen, columns: Columns) -> Iterator[GivenRow]:
    """What torch.save wrote. Only tensors and plain values are unpickled."""
    document = load_torch(seekable(content, file, MOST_BYTES_WHOLE), file)
    seen(file.stat().st_size)
    yield from rows_of_document(document, str(file), columns)


def _npz(content: Opened, file: Path, seen: Seen, columns: Columns) -> Iterator[GivenRow]:
    """Rectangles [B, T], or one number a token with the response that it is of, as tokens.npz of this project has."""
    try:
        with np.load(seekable(content, file, MOST_BYTES_WHOLE), allow_pickle=False) as packed:
            wanted = _wanted(packed.files, file, columns)
            arrays = {name: packed[name] for name in wanted}
    except MemoryError:  # or a header lies about lengths
        raise DataError(f"{file}: its arrays take too much memory to read") from None
    # RuntimeError: an encrypted file or a zip of another version.
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, AttributeError):
        raise DataError(f"{file}: cannot be read as an npz file of arrays of numbers") from None
    seen(file.stat().st_size)
    yield from rows_of_document(arrays, str(file), columns)


READERS: dict[str, Callable[[Opened, Path, Seen, Columns], Iterator[GivenRow]]] = {
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
    "arrow_stream": _arrow,
    "npz": _npz,
    "torch": _torch,
}  # by what a file holds
UNREAD = {
    "feather_1": "it is Feather in version 1; write version 2",
    "npy": "it is one array; save both sides' log-probs under their names, with numpy.savez",
    "utf_16": "it is text in UTF-16 or UTF-32; save it in UTF-8",
    "zip": "it is an archive; unpack it",
}
KNOWN_KINDS = "JSON, CSV, Parquet, Arrow, Feather, npz or .pt, also compressed as .gz, .xz or .zst"
