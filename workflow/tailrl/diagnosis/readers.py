"""Logs of any framework in parts: JSONL, Parquet, `.pt` dumps and this project's tokens.npz."""

import gzip
import itertools
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.artifacts.files import parse_arrays, parse_object, read_bytes
from tailrl.artifacts.tokens import ARRAYS
from tailrl.diagnosis.columns import ids, last, numbers
from tailrl.diagnosis.formats import Format, recognise, row_of, rows_of
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.runtime.errors import StudyError, few, reason, say
from tailrl.runtime.jsonl import numbered_lines
from tailrl.runtime.limits import MEMORY, in_limited_memory, regular

CHUNK = 200_000
"""Tokens that a part of a log holds, or one longer sequence."""

SEQUENCES_A_PART = 20_000
"""Sequences that a part holds at most: each takes a kilobyte besides its tokens."""

NUMBERS_AT_ONCE = 1_000_000
"""Of a column of Parquet: Python takes 32 bytes for each."""

TOKENS_OF_ANY_FILE, MOST_TOKENS_A_BYTE = 1_000_000, 100
"""Two log-probs of a token take several bytes in a log, compressed too; equal numbers take none."""

MOST_TOKENS_A_SEQUENCE = 10_000_000
"""More than any model reads."""

MOST_BYTES_A_LINE = 256_000_000
"""Of JSONL: a sequence of some million tokens."""

Seen = Callable[[float], object]
"""Is told each time how many more bytes of a file were read."""

GivenRow = tuple[str, Mapping[str, Any]]
"""Where it is, for messages, and its columns."""


def read_log(paths: Sequence[Path], seen: Seen = float) -> Iterator[tuple[str, Log]]:
    """The logs in these files and folders, in parts of about CHUNK tokens, each with the title of its format.

    Of a folder all files with a known ending are read, sorted by name.

    Raises:
        StudyError: a file is missing, cannot be read, is of no known format or holds no sequence; or a row's columns
            differ in length.
    """
    for file in log_files(paths):
        tokens, size = 0, file.stat().st_size
        rows = in_limited_memory(READERS[_ending(file)](file, seen), MEMORY, str(file))
        for title, part in in_parts(rows):
            tokens += len(part.sampler_T)
            if tokens > max(TOKENS_OF_ANY_FILE, MOST_TOKENS_A_BYTE * size):
                raise StudyError(f"{file}: has more than {tokens:,} tokens in {size:,} bytes, as no log of a model has")
            yield title, part
        if not tokens:
            raise StudyError(f"{file}: holds no sequence with a response")


def log_files(paths: Iterable[Path]) -> list[Path]:
    """These files and the logs in these folders, in order, each once; raises StudyError where there is no log."""
    return list({file.resolve(): file for path in paths for file in _files(path)}.values())


def _ending(file: Path) -> str:
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if _ending(file) in READERS and file.is_file())
        if not found:
            raise StudyError(f"{path}: holds no file that ends in {few(list(READERS))}")
        return found
    if not path.exists():
        raise StudyError(f"{path}: is missing")
    if _ending(path) not in READERS:
        raise StudyError(f"{path}: is no log that can be read: its name must end in {few(list(READERS))}")
    return [path]


def in_parts(rows: Iterable[tuple[str, LoggedRow]]) -> Iterator[tuple[str, Log]]:
    """Sequences, each with the title of its format, as parts of about CHUNK tokens; empty ones are left out."""
    kept: list[LoggedRow] = []
    title, size = "", 0
    for title, row in rows:
        if len(row.sampler_T):
            kept.append(row)
            size += len(row.sampler_T)
        if size >= CHUNK or len(kept) >= SEQUENCES_A_PART:
            yield title, pack(kept)
            kept, size = [], 0
    if kept:
        yield title, pack(kept)


def sequences(rows: Iterable[GivenRow], file_name: str = "") -> Iterator[tuple[str, LoggedRow]]:
    """The sequences of rows, each with the title of the format, which the first row says.

    `file_name`: it may have the step.
    """
    known, step = None, np.nan
    for where, given in rows:
        if known is None:
            known = recognise(given, where)
            step = _step_of(file_name, known)
        for line, one in enumerate(rows_of(given, known, where)):
            place = f"{where}, sequence {line}" if line else where
            row = row_of(one, known, place, step)
            if row is None:
                continue
            if len(row.sampler_T) > MOST_TOKENS_A_SEQUENCE:
                raise StudyError(f"{place}: has {len(row.sampler_T):,} tokens, more than {MOST_TOKENS_A_SEQUENCE:,}")
            yield known.title, row


def _step_of(file_name: str, known: Format) -> float:
    found = re.search(known.step_in_name, file_name) if known.step_in_name else None
    return float(found[1]) if found else np.nan


# --- kinds of files ------------------------------------------------------------------------------------


def _jsonl(file: Path, seen: Seen) -> Iterator[tuple[str, LoggedRow]]:
    return sequences(_lines(file, seen), file.name)


def _lines(file: Path, seen: Seen) -> Iterator[GivenRow]:
    try:
        with (
            open(file, "rb", opener=regular) as raw,
            gzip.GzipFile(fileobj=raw) if file.suffix == ".gz" else raw as opened,
        ):
            place = 0
            for number, line in numbered_lines(opened, file, MOST_BYTES_A_LINE):
                where = f"{file}, line {number}"
                seen(raw.tell() - place)
                place = raw.tell()
                try:
                    given = parse_object(line, where)
                except StudyError as error:
                    # A line that is whole, and no JSON object, is a mistake of another kind.
                    if number == 1 or line.endswith(b"\n") or "not valid JSON" not in str(error):
                        raise
                    say(
                        f"{where}: is cut off, and left out: the file is still being written, or its writer was stopped"
                    )
                    return
                yield where, given
    except (OSError, EOFError, zlib.error) as error:
        raise StudyError(f"{file}: cannot be read: {reason(error)}") from None


def _parquet(file: Path, seen: Seen) -> Iterator[tuple[str, LoggedRow]]:
    return sequences(_parquet_rows(file, seen), file.name)


def _parquet_rows(file: Path, seen: Seen) -> Iterator[GivenRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with (
            open(file, "rb", opener=regular) as raw,
            pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1_000_000) as opened,
        ):
            names = opened.schema_arrow.names
            known = recognise(names, str(file))
            # A log may hold images and whole conversations beside.
            wanted = [name for name in known.columns.values() if name in names]
            number, bytes_a_row = 0, file.stat().st_size / max(opened.metadata.num_rows, 1)
            # Without threads, whose stacks would count as memory.
            for batch in opened.iter_batches(_rows_at_once(opened.metadata), columns=wanted, use_threads=False):
                seen(batch.num_rows * bytes_a_row)
                for given in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", given
    except MemoryError:  # pyarrow's own is an ArrowException too
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise StudyError(f"{file}: cannot be read: {reason(error)}") from None


def _rows_at_once(metadata: Any) -> int:
    """Rows whose longest column has about NUMBERS_AT_ONCE numbers, from 1 to 256: a small file may hold long rows."""
    numbers_a_row = [
        group.column(column).num_values / max(group.num_rows, 1)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for column in range(group.num_columns)
    ]
    return max(1, min(256, int(NUMBERS_AT_ONCE / max([1.0, *numbers_a_row]))))


def _dump(file: Path, seen: Seen) -> Iterator[tuple[str, LoggedRow]]:
    """A dump of slime or miles: a dictionary with `samples`. Only tensors and plain values are unpickled."""
    import torch

    try:
        with open(file, "rb", opener=regular) as opened:
            if not zipfile.is_zipfile(opened):
                raise StudyError(f"{file}: cannot be read: it is not what torch.save writes")
            opened.seek(0)
            loaded = torch.load(opened, map_location="cpu", weights_only=True)
    except (StudyError, MemoryError):
        raise
    except Exception as error:  # torch and zipfile have their own, and so has what torch unpickles with
        why = reason(error)
        if type(error).__name__ == "UnpicklingError":
            why = "it holds other objects than tensors and plain values, which could run code; they are not loaded"
        raise StudyError(f"{file}: cannot be read: {why}") from None
    samples = _samples(loaded, file)
    seen(file.stat().st_size)
    shared = {name: loaded[name] for name in ("rollout_id",) if name in loaded}
    rows = ((f"{file}, sample {number}", {**sample, **shared}) for number, sample in enumerate(samples))
    yield from sequences(rows, file.name)


def _samples(loaded: Any, file: Path) -> list[dict[str, Any]]:
    """slime dumps a list of samples; miles one dictionary of columns, each with a value a sample."""
    found = loaded if isinstance(loaded, dict) else {}
    samples, columns = found.get("samples"), found.get("rollout_data")
    if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples):
        return samples
    if not isinstance(columns, dict) or not isinstance(columns.get("response_lengths"), list):
        raise StudyError(f"{file}: has no samples, as a dump of slime or miles has")
    if str(found.get("cp_size", 1)) != "1":
        raise StudyError(f"{file}: has a part of each response, for context parallelism cut them; log without it")
    count = len(columns["response_lengths"])
    whole = {name: values for name, values in columns.items() if isinstance(values, list) and len(values) == count}
    return [{name: values[i] for name, values in whole.items()} for i in range(count)]


def _npz(file: Path, seen: Seen) -> Iterator[tuple[str, LoggedRow]]:
    """tokens.npz of a run of this project: unmasked log-probs, step after step."""
    arrays = {name: numbers(array) for name, array in parse_arrays(read_bytes(file), ARRAYS, file).items()}
    seen(file.stat().st_size)
    if table := [name for name, array in arrays.items() if array.ndim != 1]:
        raise StudyError(f"{file}: {table[0]} is a table, not one number a token")
    step_T, sequence_T = arrays["step"], arrays["sequence"]
    changes_T = np.flatnonzero((np.diff(step_T) != 0) | (np.diff(sequence_T) != 0)) + 1
    bounds = [0, *changes_T.tolist(), len(step_T)]
    for begin, end in itertools.pairwise(bounds):
        part = {name: arrays[name][begin:end] for name in ARRAYS}
        yield (
            "tailrl, tokens.npz",
            LoggedRow(
                where=f"{file}, step {step_T[begin]:.0f}, response {sequence_T[begin]:.0f}",
                sampler_T=part["logp_infer"],
                trainer_T=part["logp_train"],
                token_T=ids(part["token"]),
                advantage_T=part["advantage"],
                step=last(step_T[begin]),
                reward=last(part["reward"][0]),
            ),
        )


READERS = {".jsonl": _jsonl, ".jsonl.gz": _jsonl, ".parquet": _parquet, ".pt": _dump, ".npz": _npz}
"""By the ending of a file's name."""
