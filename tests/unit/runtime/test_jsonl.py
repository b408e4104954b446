"""Every reader of JSONL ends lines at a line feed alone, drops a byte order mark and passes over blank lines."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.diagnosis.readers import read_log
from tailrl.probes.model.prompts import read_prompts
from tailrl.runtime.errors import StudyError
from tailrl.runtime.jsonl import numbered_lines
from tailrl.tasks.problem import read_problems
from tailrl.tasks.registry import load_task

BREAKS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
"""At each of these `str.splitlines` ends a line; JSON has the control characters among them escaped."""
TEXTS = ["What is 1+2?", f"What is{'1'.join(BREAKS)}?", "What is 3+4?"]


def problem_texts(file: Path) -> list[str]:
    return [problem.prompt for problem in read_problems(file)]


def task_texts(file: Path) -> list[str]:
    loaded = load_task(Aime25Task(name="aime25", path=str(file)))
    assert loaded.skipped == {}
    return [problem.prompt.partition("\n\n")[0] for problem in loaded.problems]


def logged_texts(file: Path) -> list[str | None]:
    return [text for _, part in read_log([file]) for text in part.text_S]


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[int, str], dict[str, Any]]]] = {
    "problems": (problem_texts, lambda n, text: {"id": str(n), "prompt": text, "answer": "1"}),
    "a data set": (task_texts, lambda n, text: {"problem": text, "answer": str(n)}),
    "prompts": (lambda file: list(read_prompts(file).values()), lambda _, text: {"prompt": text}),
    "a log": (logged_texts, lambda _, text: {"sampler_logprobs": [-1.0], "trainer_logprobs": [-1.0], "text": text}),
}


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n \n\n"], ids=["lf", "crlf", "blank lines"])
@pytest.mark.parametrize("name", READERS)
def test_the_same_lines_for_every_reader(name: str, start: str, end: str, tmp_path: Path) -> None:
    read, row = READERS[name]
    file = tmp_path / "lines.jsonl"
    lines = [json.dumps(row(n, text), ensure_ascii=False) + end for n, text in enumerate(TEXTS, 1)]
    file.write_bytes((start + "".join(lines)).encode("utf-8"))
    assert read(file) == TEXTS


def test_a_prompts_text_file_ends_its_lines_alike(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\u2028more\r\n\r\ntwo\x85\n".encode())
    assert read_prompts(file) == {f"{file}, line 1": "one\u2028more", f"{file}, line 3": "two\x85"}


def test_lines_keep_their_numbers_and_their_ends() -> None:
    opened = io.BytesIO(b"\xef\xbb\xbfa\n\n b\r\nc")
    assert list(numbered_lines(opened, "f")) == [(1, b"a\n"), (3, b" b\r\n"), (4, b"c")]


def test_a_line_may_be_too_long() -> None:
    with pytest.raises(StudyError, match=r"^f, line 2: is longer than 4 bytes$"):
        list(numbered_lines(io.BytesIO(b"ab\nabcdef\n"), "f", 4))
