"""Rows of a published data set, from the hub or from a local file, and the problems made of them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tailrl.runtime.errors import DataError, StorageError, StudyError, reason
from tailrl.runtime.hub import use_cache_without_hub
from tailrl.runtime.jsonl import json_value, numbered_lines
from tailrl.runtime.limits import MEMORY, in_limited_memory, regular
from tailrl.tasks.loaded import Loaded, canonical
from tailrl.tasks.problem import Problem
from tailrl.tasks.scoring import same_math

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."
"""The instruction after every problem of a data set; `tasks.scoring.score` reads the last box."""

LONGEST_TEXT = 100_000
"""Longest problem, characters. No policy's context holds more, and a tokenizer may take minutes to find out."""

LONGEST_LINE = 16_000_000
"""Longest line of a JSONL file, bytes."""

MOST_TABLE_ROWS = 10_000_000
"""Most rows of a data set. A parquet file of a megabyte may claim a billion."""

MOST_BYTES = 20e9
"""Most bytes of a parquet file's rows. Compressed they may be a thousandth of it."""

_ROWS_AT_ONCE = 1_000


class RowError(Exception):
    """A row that cannot become a problem. Its message is the reason, the same for all rows of its kind."""


def read_rows(path: str | None, hub_name: str, split: str) -> Iterator[object]:
    """The rows of a local parquet or JSONL file, or of the hub's data set where `path` is None.

    Raises StudyError where they cannot be read. A line of JSONL that is not JSON is given as None.
    """
    if path is None:
        data = fetch(hub_name, split)
        return (row for table in data.with_format("arrow").iter(_ROWS_AT_ONCE) for row in table.to_pylist())
    readers = {".parquet": _parquet_batches, ".jsonl": _jsonl_batches}
    file = Path(path)
    if file.suffix not in readers:
        raise DataError(f"{path}: is not a data file that can be read: its name must end in .parquet or .jsonl")
    return (row for rows in in_limited_memory(readers[file.suffix](file), MEMORY, str(file)) for row in rows)


def fetch(hub_name: str, split: str) -> Any:
    """The hub's `datasets.Dataset`; from the Hugging Face cache if the hub is out of reach."""
    import datasets

    use_cache_without_hub()
    try:
        return datasets.load_dataset(hub_name, split=split)
    # The hub's client, its HTTP library and each file format's reader raise their own exceptions.
    except Exception as error:
        raise StorageError(
            f"{hub_name}: cannot be loaded from the Hugging Face hub or its cache ({reason(error)}): run "
            "`snakemake --cores 1 download` where there is a network, or set the task's path to a local parquet or "
            "JSONL file (task.path)"
        ) from None


def _parquet_batches(file: Path) -> Iterator[list[object]]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with (
            open(file, "rb", opener=regular) as opened,
            pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=1_000_000) as parquet,
        ):
            _check_size(file, parquet.metadata.num_rows, 0)
            size = 0
            # Without threads, whose stacks would count as memory.
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, use_threads=False):
                size += batch.nbytes
                _check_size(file, 0, size)
                yield batch.to_pylist()
    except MemoryError:  # pyarrow's own is an ArrowException too
        raise
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _unreadable(file, "parquet", error) from None


def _jsonl_batches(file: Path) -> Iterator[list[object]]:
    try:
        with open(file, "rb", opener=regular) as opened:
            for _, line in numbered_lines(opened, file, LONGEST_LINE):
                yield [json_value(line.decode("utf-8"))]
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, "UTF-8 text", error) from None


def _check_size(source: object, rows: int, size: int) -> None:
    if rows > MOST_TABLE_ROWS:
        raise DataError(f"{source}: has {rows} rows, more than {MOST_TABLE_ROWS}")
    if size > MOST_BYTES:
        raise DataError(f"{source}: its rows take more than {MOST_BYTES / 1e9:g} GB")


def _unreadable(file: Path, kind: str, error: Exception) -> StudyError:
    return DataError(f"{file}: cannot be read as {kind}: {reason(error)}")


def text_of(value: object, what: str) -> str:
    """A text, stripped and not empty; raises RowError that names `what`."""
    if value is None:
        raise RowError(f"{what} is missing")
    if not isinstance(value, str):
        raise RowError(f"{what} is not text")
    text = value.strip()
    if not text:
        raise RowError(f"{what} is empty")
    if len(text) > LONGEST_TEXT:
        raise RowError(f"{what} has more than {LONGEST_TEXT} characters")
    if not _is_unicode(text):
        raise RowError(f"{what} is not valid Unicode")
    return text


def answer_of(value: object) -> str:
    """An answer, given as text or as a whole number; raises RowError."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return text_of(str(value) if whole else value, "answer")


def make_problems(
    rows: Iterable[object], read_row: Callable[[dict[str, Any]], tuple[object, str, str]], source: str, keep: int | None
) -> Loaded:
    """The first `keep` different problems, in the order of the rows.

    Problems are the same where their texts agree up to white space and Unicode's composed forms. One that comes
    with different answers is dropped, and its first row alone is listed as skipped; `1/2` and `\\frac{1}{2}` are one
    answer. A problem's id, and that of a skipped row, is the row's own where that is a text or number not used before,
    else `row <number from 1>`.

    Args:
        rows: the data set's rows; one that is not a dict is skipped.
        read_row: a row's id (of any type), problem text and answer; raises RowError.
        source: names the data in the StudyError that is raised where no row can be used.
        keep: None keeps all; so does a number larger than there are problems.
    """
    found: dict[str, Problem] = {}
    spellings: dict[str, dict[str, None]] = {}  # a problem's answers that are not written as in its first row
    skipped: dict[str, list[str]] = {}
    ids: set[str] = set()
    number = 0
    for number, row in enumerate(rows, start=1):
        _check_size(source, number, 0)
        try:
            if not isinstance(row, dict):
                raise RowError("not a row of named columns")
            own_id, text, answer = read_row(row)
        except RowError as error:
            skipped.setdefault(str(error), []).append(f"row {number}")
            continue
        key = canonical(text)
        if key not in found:
            name = _name(own_id, number, ids)
            found[key] = Problem(id=name, prompt=f"{text}\n\n{INSTRUCTION}", answer=answer)
        elif answer != found[key].answer:
            spellings.setdefault(key, {})[answer] = None
    conflicting = [
        key for key, others in spellings.items() if not all(same_math(other, found[key].answer) for other in others)
    ]
    if conflicting:
        skipped["the same problem with different answers"] = [found.pop(key).id for key in conflicting]
    if not found:
        reasons = "; ".join(f"{reason} ({len(names)})" for reason, names in skipped.items())
        raise DataError(
            f"{source}: none of its {number} rows can be used: {reasons}" if number else f"{source}: has no rows"
        )
    return Loaded(list(found.values())[:keep], skipped)


def _name(own_id: object, number: int, used: set[str]) -> str:
    name = str(own_id) if isinstance(own_id, str | int) else ""
    if not name or name in used or not _is_unicode(name):
        name = f"row {number}"
    used.add(name)
    return name


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: JSON can carry lone surrogates, a file cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
