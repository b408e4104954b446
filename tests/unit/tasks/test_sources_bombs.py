"""Data that are small on the disk and large in memory, or that never end: one sentence, in bounded memory and time."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from cases_fixture import rest_long

GOOD = {"problem": "What is 1 + 1?", "answer": "2"}
PROBE = r"""
import re, sys
from pathlib import Path
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.runtime.errors import StudyError
from tailrl.tasks.registry import load_task
try:
    print(load_task(Aime25Task(name="aime25", path=sys.argv[1])).skipped)
except StudyError as error:
    print(error)
print(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])
"""


def endless_line(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(3_000_000_000)  # a sparse file, which reads as zeros


def nested(file: Path) -> None:
    file.write_text("[" * 5_000_000 + "\n" + json.dumps(GOOD) + "\n")


def long_number(file: Path) -> None:
    file.write_text(f'{{"problem": "1 + 1", "answer": {"9" * 5_000_000}}}\n{json.dumps(GOOD)}\n')


def repeated(file: Path) -> None:
    """2,000 rows of 4 MB each, 8 GB in all, as one entry of a dictionary: less than a kilobyte."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * 4_000_000]))
    pq.write_table(pa.table({"problem": texts, "answer": ["2"] * 2000}), file, compression="zstd")


def compressed(file: Path) -> None:
    """Columns of 4 GB, in 600 kB or less."""
    table = pa.table({"problem": pa.array(["x" * 4_000_000] * 20), "answer": ["2"] * 20})
    with pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(50):
            writer.write_table(table)


def one_row(file: Path) -> None:
    """One row of 1 GB, in 31 kB."""
    size = 1_000_000_000
    offsets = pa.py_buffer(struct.pack("<ii", 0, size))
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(bytes(size))])
    table = pa.table({"problem": column, "answer": ["2"]})
    pq.write_table(table, file, compression="zstd", use_dictionary=False, write_statistics=False)


def many_rows(file: Path) -> None:
    """A footer that claims 11 million rows, of nothing."""
    nothing = pa.nulls(11_000_000, pa.string())
    pq.write_table(pa.table({"problem": nothing, "answer": nothing}), file)


def many_bytes(file: Path) -> None:
    """Rows of 30 kB, each small enough: 21 GB in all, in batches of 0.3 GB."""
    table = pa.table({"problem": pa.array(["x" * 30_000] * 10_000), "answer": ["2"] * 10_000})
    with pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(70):
            writer.write_table(table)


MEMORY = "takes more than 2 GB of memory to read"
SKIPPED = "{'not a row of named columns': ['row 1']}"
BOMBS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a line that never ends": (endless_line, ".jsonl", "line 1: is longer than 16,000,000 bytes"),
    "five million brackets": (nested, ".jsonl", SKIPPED),
    "a number of five million digits": (long_number, ".jsonl", SKIPPED),
    "one text repeated": (repeated, ".parquet", MEMORY),
    "a column that decompresses to 4 GB": (compressed, ".parquet", MEMORY),
    "a row of 1 GB": (one_row, ".parquet", MEMORY),
    "a footer with too many rows": (many_rows, ".parquet", "has 11000000 rows, more than 10000000"),
    "20 GB in small rows": (many_bytes, ".parquet", "its rows take more than 20 GB"),
}
SLOW = ("20 GB in small rows", "a row of 1 GB", "a column that decompresses to 4 GB")


@pytest.mark.parametrize("bomb", rest_long([name for name in BOMBS if name not in SLOW], BOMBS))
def test_a_bomb_is_one_sentence(tmp_path: Path, bomb: str) -> None:
    """With at most 2.5 GB of memory, and 120 s of a processor."""
    make, ending, sentence = BOMBS[bomb]
    file = tmp_path / f"bomb{ending}"
    make(file)
    before = os.times()
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, str(file)], capture_output=True, text=True, timeout=600, check=True
    )
    after = os.times()
    said, peak = ended.stdout.splitlines()
    assert said.endswith(sentence) and (ending == ".jsonl" or said.startswith(str(file)))
    assert int(peak) < 2_500_000
    assert after.children_user + after.children_system - before.children_user - before.children_system < 120


@pytest.mark.slow  # "one text repeated" above is counted in pieces
def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    """A row group of 600 MB, with 500 MB of memory. Up to half of that is for pyarrow's libraries and allocator."""
    file = tmp_path / "large.parquet"
    texts = pa.array([f"{number} {'word ' * 200}" for number in range(2000)])
    table = pa.table({"problem": texts, "answer": ["2"] * 2000})
    pq.write_table(pa.concat_tables([table] * 300), file, use_dictionary=False, compression="none")
    probe = f"import tailrl.tasks.sources as sources\nsources.MEMORY = 5e8\n{PROBE}"
    ended = subprocess.run([sys.executable, "-c", probe, str(file)], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[0] == "{}"
