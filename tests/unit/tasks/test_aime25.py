import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.runtime.errors import StudyError
from tailrl.tasks.aime25 import HUB_NAME
from tailrl.tasks.registry import download_task, load_task
from tailrl.tasks.scoring import score
from tailrl.tasks.sources import INSTRUCTION


def jsonl(tmp_path: Path, rows: list[Any]) -> str:
    path = tmp_path / "aime.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task(path: str | None = None, problems: int | None = None) -> Aime25Task:
    return Aime25Task(name="aime25", path=path, problems=problems)


def test_problems_with_our_instruction(tmp_path: Path) -> None:
    rows = [{"problem": f"Find ${n}$.", "answer": answer, "id": str(n)} for n, answer in enumerate(["70", "049", "0"])]
    path = tmp_path / "aime.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    loaded = load_task(task(str(path)))
    assert [(p.id, p.prompt, p.answer) for p in loaded.problems] == [
        ("0", f"Find $0$.\n\n{INSTRUCTION}", "70"),
        ("1", f"Find $1$.\n\n{INSTRUCTION}", "49"),
        ("2", f"Find $2$.\n\n{INSTRUCTION}", "0"),
    ]
    assert loaded.skipped == {}
    assert [p.id for p in load_task(task(str(path), problems=2)).problems] == ["0", "1"]
    assert score(r"\boxed{049}", loaded.problems[1].answer) == 1.0


def test_an_answer_is_an_integer_from_0_to_999(tmp_path: Path) -> None:
    answers: list[Any] = ["999", 999, 0, "1000", -1, "-1", "1/2", 70.0, None, "", True, r"1000^\circ", "x", "9^9^9"]
    rows = [{"problem": f"P{n}", "answer": answer, "id": n} for n, answer in enumerate(answers)]
    rows += [{"answer": "1"}, {"problem": " ", "answer": "1"}, {"problem": ["P"], "answer": "1"}]
    loaded = load_task(task(jsonl(tmp_path, rows)))
    assert [(p.id, p.answer) for p in loaded.problems] == [("0", "999"), ("1", "999"), ("2", "0")]
    assert loaded.skipped == {
        "answer is not an integer from 0 to 999": [f"row {row}" for row in (4, 5, 6, 7, 12, 13, 14)],
        "answer is not text": ["row 8", "row 11"],
        "answer is missing": ["row 9"],
        "answer is empty": ["row 10"],
        "problem is missing": ["row 15"],
        "problem is empty": ["row 16"],
        "problem is not text": ["row 17"],
    }


ANGLES = [
    r"336^\circ",
    r"336^{\circ}",
    "336°",
    "336.0",
    r"$336^\circ$",
    r"336\text{ degrees}",
    r"\text{336}",
    "x = 336",
]


@pytest.mark.parametrize("column", ["problem", "question"])
def test_an_angle_and_other_spellings_are_kept_as_the_number_itself(column: str, tmp_path: Path) -> None:
    """One problem of AIME 2025 asks for degrees; copies of the data set name the column in two ways."""
    rows = [{column: f"P{n}", "answer": answer} for n, answer in enumerate(ANGLES)]
    loaded = load_task(task(jsonl(tmp_path, rows)))
    assert [problem.answer for problem in loaded.problems] == ["336"] * len(ANGLES)
    assert loaded.skipped == {}


def test_a_file_of_another_shape_is_one_sentence(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": "P", "answer": 1}, 5])
    with pytest.raises(StudyError) as caught:
        load_task(task(path))
    assert str(caught.value) == (
        f"{path}: none of its 2 rows can be used: problem is missing (1); not a row of named columns (1)"
    )


def test_the_test_split_of_the_hub_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([{"problem": "P", "answer": "7", "id": "0"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_task(task()).problems[0].answer == "7"
    download_task(task())
    assert asked == [(HUB_NAME, "test")] * 2
