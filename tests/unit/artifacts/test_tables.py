"""CSV tables of records: their columns, and NaN as an empty cell."""

import csv
import math
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.reports.scores.numbers import PolicyScore
from tailrl.stats.intervals import Interval
from tailrl.stats.tests import paired_difference


def test_two_fields_of_one_column() -> None:
    """Otherwise one field would overwrite the other."""
    inner = Interval(1.0, 0.0, 2.0, 3)
    with pytest.raises(ValueError, match="two fields of Twice give the column gain_low"):
        flat_rows([make_dataclass("Twice", ["gain", "gain_low"])(inner, 0.5)])


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.csv"
    single = paired_difference([0.5], [0.0])
    rows = flat_rows([PolicyScore("x", 3, Interval(1.0, math.nan, math.nan, 1), 0.25, single)])
    write_csv(path, rows)
    with path.open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["arm"], line["avg_mean"], line["avg_low"], line["gain_mean"]) == ("x", "1", "", "0.5")
    write_csv(path, [{"a": 1 / 3, "b": 7, "c": math.inf}])
    assert path.read_text() == "a,b,c\n0.333333333,7,inf\n"
    write_csv(path, [])
    assert path.read_text().strip() == ""
