"""Logs that are small on the disk and large in memory: one sentence each, in bounded memory, within a minute."""

import gzip
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch

from tailrl.artifacts.tokens import ARRAYS

PROBE = r"""
import re, sys
from pathlib import Path
import torch
from tailrl.diagnosis import readers
from tailrl.runtime.errors import StudyError
readers.MEMORY = 3e8
for file in map(Path, sys.argv[1:]):
    try:
        print(sum(len(log.sampler_T) for _, log in readers.read_log([file])))
    except StudyError as error:
        print(error)
print(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])
"""


def equal_rows(file: Path, rows: int, tokens: int) -> None:
    numbers = pa.array(np.full(rows * tokens, -0.5))
    lists = pa.LargeListArray.from_arrays(pa.array(np.arange(rows + 1) * tokens), numbers)
    pq.write_table(pa.table({"sampler_logprobs": lists, "trainer_logprobs": lists}), file)


def many_rows(file: Path) -> None:
    """8 million equal tokens: 5 kB."""
    equal_rows(file, 256, 30_000)


def one_row(file: Path) -> None:
    """A row of 10 million equal tokens: as Python's numbers they take 0.6 GB."""
    equal_rows(file, 1, 10_000_000)


def expanded(file: Path) -> None:
    """Tensors of 300 million numbers, each with one in memory."""
    tensor = torch.zeros(1).expand(300_000_000)
    names = ("tokens", "rollout_log_probs", "log_probs", "loss_mask")
    torch.save({"samples": [dict.fromkeys(names, tensor)]}, file)


def zeros(file: Path) -> None:
    """Arrays of 40 MB each."""
    header = {"descr": "<f8", "fortran_order": False, "shape": (5_000_000,)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name in ARRAYS:
            with packed.open(f"{name}.npy", "w") as array:
                np.lib.format.write_array_header_1_0(array, header)
                array.write(bytes(40_000_000))


def empty_lines(file: Path) -> None:
    file.write_bytes(gzip.compress(b"\n" * 10_000_000, 1))


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "rows.parquet": (many_rows, "has more than 1,"),
    "row.parquet": (one_row, "takes more than 0.3 GB of memory to read"),
    "3.pt": (expanded, "takes more than 0.3 GB of memory to read"),
    "tokens.npz": (zeros, "its arrays take too much memory to read"),
    "empty.jsonl.gz": (empty_lines, "has more than 1000000 empty lines"),
}


@pytest.mark.slow
def test_a_bomb_is_one_sentence(tmp_path: Path) -> None:
    for name, (make, _) in BOMBS.items():
        make(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 10_000_000
    command = [sys.executable, "-c", PROBE, *(str(tmp_path / name) for name in BOMBS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    *said, peak = ended.stdout.splitlines()
    for sentence, (name, (_, words)) in zip(said, BOMBS.items(), strict=True):
        assert sentence.startswith(f"{tmp_path / name}: {words}")
    assert int(peak) < 1_500_000
