"""claims.csv: what is written is read, and one sentence for each table that cannot be used."""

import math
from dataclasses import fields
from pathlib import Path

import pytest
from claims_fixture import line_of

from tailrl.artifacts.claims import Verdict, read_verdicts, verdicts_of, write_verdicts
from tailrl.artifacts.published import read_published
from tailrl.artifacts.tables import read_csv
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[3]
PUBLISHED = read_published(ROOT / "docs/results", "claims")
HEADER = ",".join(field.name for field in fields(Verdict))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "claims.csv"
    lines = [line_of("a", seen="DVP, and more", low=0.1), line_of("b", seen='a "quote"', effect=math.nan)]
    write_verdicts(path, lines)
    assert str(read_verdicts(path)) == str(lines), "NaN equals nothing, but it reads alike"
    write_verdicts(path, [])
    assert read_verdicts(path) == []


@pytest.mark.parametrize("study", PUBLISHED)
def test_published_lines_are_read_and_written_without_a_change(study: str, tmp_path: Path) -> None:
    rows = [{key: row[key] for key in row if key != "page"} for row in PUBLISHED[study]]
    write_verdicts(tmp_path / "claims.csv", verdicts_of(rows, tmp_path))
    assert read_csv(tmp_path / "claims.csv") == rows


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        (HEADER.removesuffix(",endpoint"), "a,b,c,d,,,,,,3,,,,,,,", "a line has no endpoint"),
        (HEADER, "a,b,c,d,,,,,,3,,,,,,,,,", "a line has more cells than the header"),
        (HEADER + ",more", "a,b,c,d,,,,,,3,,,,,,,,,", "line 2: more: Unexpected keyword argument"),
        (HEADER, "a,b,c,d,,,,,,,,,,,,,,", "line 2: seeds: Input should be a valid integer"),
        (HEADER, "a,b,c,d,,,,,,3,high,,,,,,,", "line 2: effect: Input should be a valid number"),
    ],
)
def test_a_table_that_cannot_be_used(header: str, line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "claims.csv"
    path.write_text(f"{header}\n{line}\n")
    with pytest.raises(StudyError) as error:
        read_verdicts(path)
    assert str(error.value).startswith(str(path)) and words in str(error.value) and "\n" not in str(error.value)
