"""What is written in the documented schema is read again as it was."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.diagnosis.log_files import write_log
from tailrl.diagnosis.readers import read_log
from tailrl.runtime.errors import StudyError

RNG = np.random.default_rng(0)


def whole(length: int) -> LoggedRow:
    """A row with every column."""
    numbers = {f"{name}_T": RNG.normal(-1, 1, length) for name in ("sampler", "trainer", "recomputed", "advantage")}
    numbers |= {f"{name}_T": RNG.normal(-1, 1, length) for name in ("again", "trainer_top", "sampler_top")}
    places = {"token_T": RNG.integers(0, 99, length), "rank_T": RNG.integers(0, 9, length).astype(float)}
    return LoggedRow("x", **numbers, **places, step=3.0, version=2.0, reward=0.5, text="é\n<b>")


def bare(length: int) -> LoggedRow:
    return LoggedRow("x", *RNG.normal(-1, 1, (2, length)))


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
@pytest.mark.parametrize("rows", [[whole(4), whole(1)], [bare(3)], [bare(3), whole(2)]], ids=["whole", "bare", "mixed"])
def test_every_column_comes_back(name: str, rows: list[LoggedRow], tmp_path: Path) -> None:
    write_log(rows, tmp_path / name)
    ((_, log),) = read_log([tmp_path / name])
    for field in fields(Log):
        expected = getattr(pack(rows), field.name)
        np.testing.assert_array_equal(getattr(log, field.name), expected, err_msg=field.name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("log.csv", r"log\.csv: a log's name must end in \.jsonl or \.parquet"),
        ("nowhere/log.jsonl", "nowhere/log.jsonl: could not be written: No such file"),
        ("nowhere/log.parquet", "nowhere/log.parquet: could not be written: "),
    ],
)
def test_a_file_that_cannot_be_written_is_one_sentence(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=words) as caught:
        write_log([bare(2)], tmp_path / name)
    assert "\n" not in str(caught.value)
