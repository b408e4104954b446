"""Problem files: written, read back, and refused with the line that is wrong."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, read_problems, write_problems

PROBLEMS = [
    Problem("a", "1+2=\n", "3", "1+2=3,\\boxed{3}"),
    Problem("b/é", 'Say "∫"\t\u2028 and {{ x }}', "\\frac12"),
]


def test_write_and_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "problems.jsonl"
    write_problems(PROBLEMS, file)
    assert read_problems(file) == PROBLEMS
    assert len(file.read_text(encoding="utf-8").split("\n")) == len(PROBLEMS) + 1
    assert "é" in file.read_text(encoding="utf-8")


def test_a_level_is_written_where_there_is_one(tmp_path: Path) -> None:
    """Without a curriculum a study's files have the same bytes as before there were levels."""
    levels = [replace(PROBLEMS[0], level=level) for level in (0, 3)]
    write_problems(levels, tmp_path / "file")
    first, last = (tmp_path / "file").read_text(encoding="utf-8").splitlines()
    assert "level" not in first and last.endswith(', "level": 3}')
    assert read_problems(tmp_path / "file") == levels


@pytest.mark.parametrize("level", ["-1", "true", "1.0", '"1"', "null"])
def test_a_level_is_a_whole_number(tmp_path: Path, level: str) -> None:
    line = f'{{"id": "a", "prompt": "p", "answer": "1", "level": {level}}}\n'
    (tmp_path / "file").write_text(line, encoding="utf-8")
    with pytest.raises(StudyError, match="line 1: not a problem: its level must be a whole number from 0"):
        read_problems(tmp_path / "file")


def test_the_same_problems_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_problems(iter(PROBLEMS), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_solution_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"id": "a", "prompt": "p", "answer": "1"}\n', encoding="utf-8")
    assert read_problems(tmp_path / "file") == [Problem("a", "p", "1")]


@pytest.mark.parametrize(
    "line",
    ["{", "[1, 2]", '"text"', '{"id": "a", "prompt": "p"}', '{"id": "", "prompt": "", "answer": "", "x": 1}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "problems.jsonl"
    write_problems(PROBLEMS, file)
    with file.open("a", encoding="utf-8") as end:
        end.write(line + "\n")
    with pytest.raises(StudyError, match=r"problems\.jsonl, line 3: not a problem: ."):
        read_problems(file)


def test_no_file_and_no_problem(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"missing\.jsonl: cannot be read: .*No such file"):
        read_problems(tmp_path / "missing.jsonl")
    with pytest.raises(StudyError, match=r"cannot be read: .*Is a directory"):
        read_problems(tmp_path)
    write_problems([], tmp_path / "empty.jsonl")
    with pytest.raises(StudyError, match=r"empty\.jsonl: holds no problem"):
        read_problems(tmp_path / "empty.jsonl")


def test_a_file_that_is_not_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_bytes(b"\xff\xfe\x00PAR1")
    with pytest.raises(StudyError, match=r"problems\.jsonl"):
        read_problems(tmp_path / "problems.jsonl")


def test_a_problem_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        PROBLEMS[0].answer = "4"  # type: ignore[misc]
