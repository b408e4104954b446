import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.tasks.dapo_math import DapoMathTask
from tailrl.runtime.errors import StudyError
from tailrl.tasks import scoring
from tailrl.tasks.dapo_math import HUB_NAME
from tailrl.tasks.problem import read_problems, write_problems
from tailrl.tasks.registry import download_task, load_task
from tailrl.tasks.registry import load_task as load
from tailrl.tasks.sources import INSTRUCTION

PUBLISHED = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def row(problem: str, answer: Any = "34", index: str | None = None) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": PUBLISHED.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def parquet(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def jsonl(tmp_path: Path, rows: list[Any]) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task(path: str | None = None, problems: int | None = None) -> DapoMathTask:
    return DapoMathTask(name="dapo_math", path=path, problems=problems)


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_every_problem_once_with_our_instruction(write: Any, tmp_path: Path) -> None:
    rows = [row("What is $1+1$?", "2", "u-1"), row("What is\n\n$x$ if $x=3$?", "3", "u-2")] * 3
    loaded = load(task(write(tmp_path, rows)))
    assert [(p.id, p.prompt, p.answer, p.solution) for p in loaded.problems] == [
        ("u-1", f"What is $1+1$?\n\n{INSTRUCTION}", "2", ""),
        ("u-2", f"What is\n\n$x$ if $x=3$?\n\n{INSTRUCTION}", "3", ""),
    ]
    assert loaded.skipped == {}
    assert "\\boxed{}" in INSTRUCTION


def test_a_problem_without_the_wrapper_is_kept_as_it_is(tmp_path: Path) -> None:
    bare = row("")
    bare["prompt"][0]["content"] = "  Find $x$.\n"
    assert load(task(jsonl(tmp_path, [bare]))).problems[0].prompt == f"Find $x$.\n\n{INSTRUCTION}"


def test_the_same_problem_is_found_under_white_space_composition_and_spelling_of_its_answer(tmp_path: Path) -> None:
    rows = [row("Caf\u00e9  problem", "7"), row("Cafe\u0301\nproblem ", "07"), row("caf\u00e9 problem", "8")]
    loaded = load(task(jsonl(tmp_path, rows)))
    assert [(p.id, p.answer) for p in loaded.problems] == [("row 1", "7"), ("row 3", "8")]


def test_conflicting_answers_drop_the_problem(tmp_path: Path) -> None:
    rows = [row("A", "1", "a"), row("B", "2", "b"), row("A", "3", "c"), row("A", "1", "d"), row("A", "4", "e")]
    loaded = load(task(jsonl(tmp_path, rows)))
    assert [p.id for p in loaded.problems] == ["b"]
    assert loaded.skipped == {"the same problem with different answers": ["a"]}


def test_two_spellings_of_an_answer_are_no_conflict(tmp_path: Path) -> None:
    rows = [row("A", "1/2"), row("A", r"\frac{1}{2}"), row("A", "0.5"), row("B", r"336^\circ"), row("B", "336")]
    rows += [row("C", r"\frac12"), row("C", r"\frac13"), row("D", "Monday"), row("D", "Friday"), row("A", "1/2")]
    loaded = load(task(jsonl(tmp_path, rows)))
    assert [p.answer for p in loaded.problems] == ["1/2", r"336^\circ"]
    assert loaded.skipped == {"the same problem with different answers": ["row 6", "row 8"]}


def test_answers_that_are_spelled_alike_need_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_verifier", None)
    rows = [row("A", r"\frac12")] * 3 + [row("B", "7"), row("B", "07"), row("C", "8"), row("C", "9")]
    assert [p.answer for p in load(task(jsonl(tmp_path, rows))).problems] == [r"\frac12", "7"]


def test_the_first_problems_are_kept_after_the_others_are_dropped(tmp_path: Path) -> None:
    rows = [row("A", "1"), row("A", "2"), row("B"), row("B"), row("C"), row("D")]
    path = jsonl(tmp_path, rows)
    assert [p.id for p in load(task(path, problems=2)).problems] == ["row 3", "row 5"]
    assert [p.id for p in load(task(path, problems=99)).problems] == ["row 3", "row 5", "row 6"]


def test_ids_are_the_rows_own_where_they_are_different(tmp_path: Path) -> None:
    rows = [row("A", index="u"), row("B", index="u"), row("C", index=""), row("D"), row("E")]
    rows[3]["extra_info"] = {"index": 17}
    del rows[4]["extra_info"]
    assert [p.id for p in load(task(jsonl(tmp_path, rows))).problems] == ["u", "row 2", "row 3", "17", "row 5"]


def test_unusable_rows_are_listed_by_reason(tmp_path: Path) -> None:
    message = {"role": "user", "content": "?"}
    rows: list[Any] = [
        row("usable"),
        {**row("x"), "prompt": None},
        {**row("x"), "prompt": "text"},
        {**row("x"), "prompt": [message, message]},
        {**row("x"), "prompt": [{**message, "role": "system"}]},
        {**row("x"), "prompt": [{"role": "user"}]},
        {**row("x"), "prompt": [{**message, "content": 5}]},
        row("  "),
        {**row("x"), "prompt": [{**message, "content": "\n"}]},
        {"prompt": [message]},
        {**row("x"), "reward_model": "34"},
        row("x", None),
        row("x", "  "),
        row("x", 3.5),
        row("x", True),
        row("\ud800"),
        [1],
        None,
    ]
    loaded = load(task(jsonl(tmp_path, rows)))
    assert [p.id for p in loaded.problems] == ["row 1"]
    assert loaded.skipped == {
        "prompt is missing": ["row 2"],
        "prompt is not one message of the user": ["row 3", "row 4", "row 5"],
        "problem is missing": ["row 6"],
        "problem is not text": ["row 7"],
        "problem is empty": ["row 8", "row 9"],
        "reward_model is missing or not a record": ["row 10", "row 11"],
        "answer is missing": ["row 12"],
        "answer is empty": ["row 13"],
        "answer is not text": ["row 14", "row 15"],
        "problem is not valid Unicode": ["row 16"],
        "not a row of named columns": ["row 17", "row 18"],
    }


def test_lines_that_are_not_json_are_listed_and_blank_lines_are_not_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{{broken\n\n{json.dumps(row('A'))}\n{'[' * 100_000}\n", encoding="utf-8")
    loaded = load(task(str(path)))
    assert [p.id for p in loaded.problems] == ["row 2"]
    assert loaded.skipped == {"not a row of named columns": ["row 1", "row 3"]}


def test_whole_numbers_are_answers_too(tmp_path: Path) -> None:
    assert load(task(jsonl(tmp_path, [row("A", 34)]))).problems[0].answer == "34"


def test_problems_survive_their_file(tmp_path: Path) -> None:
    loaded = load(task(jsonl(tmp_path, [row("Größe\u2028of $\\alpha$", "5", "u")])))
    write_problems(loaded.problems, tmp_path / "problems.jsonl")
    assert read_problems(tmp_path / "problems.jsonl") == loaded.problems


def one_sentence(path: str | None) -> str:
    with pytest.raises(StudyError) as caught:
        load(task(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_without_a_usable_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, [{"question": "1+1", "answer": "2"}] * 2)
    assert one_sentence(path) == f"{path}: none of its 2 rows can be used: prompt is missing (2)"
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert one_sentence(str(empty)) == f"{empty}: has no rows"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert one_sentence(str(tmp_path / "no.jsonl")).endswith(
        "no.jsonl: cannot be read as UTF-8 text: No such file or directory"
    )
    assert "no.parquet: cannot be read as parquet: " in one_sentence(str(tmp_path / "no.parquet"))
    (tmp_path / "folder.jsonl").mkdir()
    assert one_sentence(str(tmp_path / "folder.jsonl")).endswith("Is a directory")
    (tmp_path / "latin.jsonl").write_bytes('{"problem": "Größe"}\n'.encode("latin-1"))
    assert "latin.jsonl: cannot be read as UTF-8 text: " in one_sentence(str(tmp_path / "latin.jsonl"))
    (tmp_path / "text.parquet").write_text("not parquet", encoding="utf-8")
    assert "text.parquet: cannot be read as parquet: " in one_sentence(str(tmp_path / "text.parquet"))
    for name in ("data.csv", "data", "data.PARQUET"):
        assert "its name must end in .parquet or .jsonl" in one_sentence(str(tmp_path / name))


def test_a_parquet_file_with_broken_text(tmp_path: Path) -> None:
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\x02\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
    )
    path = tmp_path / "broken.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), path)
    assert "broken.parquet: cannot be read as parquet: " in one_sentence(str(path))


# --- the hub -----------------------------------------------------------------------------------------


def test_the_hubs_rows_are_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    published = datasets.Dataset.from_list([row("A", "1", "a"), row("A", "1", "a"), row("B", "2", "b")])
    asked = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return published

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [(p.id, p.answer) for p in load_task(task()).problems] == [("a", "1"), ("b", "2")]
    assert asked == [(HUB_NAME, "train")]


def test_only_what_is_on_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)))
    download_task(ArithmeticTask())
    download_task(task(str(tmp_path / "local.parquet")))
    assert asked == []
    download_task(task())
    assert asked == [(HUB_NAME, "train")]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["load_task", "download_task"])
def test_without_the_hub_one_sentence_says_what_to_do(call: str, tmp_path: Path) -> None:
    # A process of its own: the hub's client reads these variables once, when it is imported.
    script = (
        "from tailrl.runtime.errors import StudyError; from tailrl.config.tasks.dapo_math import DapoMathTask\n"
        f"import datasets, time; from tailrl.tasks.registry import {call}; start = time.monotonic()\n"
        f"try: {call}(DapoMathTask(name='dapo_math'))\nexcept StudyError as error: print(error)\n"
        "assert time.monotonic() - start < 60"
    )
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.startswith(f"{HUB_NAME}: cannot be loaded from the Hugging Face hub or its cache (")
    assert "`snakemake --cores 1 download`" in ran.stdout
    assert "task.path" in ran.stdout
    assert ran.stdout.count("\n") == 1


def test_loading_tasks_imports_nothing_heavy() -> None:
    heavy = ("torch", "datasets", "pyarrow", "sympy", "math_verify", "transformers")
    modules = "tailrl.tasks.registry, tailrl.tasks.scoring"
    script = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout == "[]\n"
