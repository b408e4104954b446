"""Rows of data: local files of published data sets, and the project's own files of problems."""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
from kinds import Case, Kind
from mutations import mutated, mutated_bytes, to_json

from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.tasks.dapo_math import DapoMathTask
from tailrl.tasks.problem import read_problems, write_problems
from tailrl.tasks.registry import load_task

ROWS: dict[str, list[dict[str, Any]]] = {
    "aime25": [{"problem": f"What is {i}+{i}?", "answer": str(2 * i), "id": i} for i in range(3)],
    "dapo_math": [
        {
            "prompt": [{"role": "user", "content": f"What is {i}+{i}?"}],
            "reward_model": {"ground_truth": str(2 * i), "style": "rule"},
            "extra_info": {"index": f"i{i}"},
        }
        for i in range(3)
    ],
    "problems": [
        {
            "id": f"p{i}",
            "prompt": f"{i}+{i}=",
            "answer": str(2 * i),
            "solution": f"\\boxed{{{2 * i}}}",
            "compared": "math",
        }
        for i in range(3)
    ],
}

TASKS = {"aime25": Aime25Task, "dapo_math": DapoMathTask}


def cases(rng: Random) -> Iterator[Case]:
    """Values and text of JSON lines, and parquet of such rows, as it is or with damaged bytes."""
    text = {name: to_json(rows, lines=True) for name, rows in ROWS.items()}
    whole = {name: _parquet(rows) for name, rows in ROWS.items()}
    while True:
        name = rng.choice(list(ROWS))
        way = rng.randrange(8)
        if way >= 6 and name != "problems":
            yield f"{name}.parquet", mutated_bytes(whole[name], rng)
        elif way == 5 and name != "problems":
            try:
                yield f"{name}.parquet", _parquet(mutated(ROWS[name], rng))
            except (pyarrow.ArrowException, UnicodeError, OverflowError, TypeError, AttributeError):
                continue  # no parquet file can hold these values
        elif way >= 3:
            yield f"{name}.jsonl", mutated_bytes(text[name], rng)
        else:
            yield f"{name}.jsonl", to_json(mutated(ROWS[name], rng), lines=True)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def prepare(folder: Path) -> None:
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_bytes(to_json(rows, lines=True))


def read(folder: Path, name: str) -> None:
    """As the job that writes problems does; what it writes, every later job reads."""
    file = folder / name
    if file.stem == "problems":
        problems = read_problems(file)
    else:
        loaded = load_task(TASKS[file.stem].model_validate({"name": file.stem, "path": str(file)}))
        json.dumps(loaded.skipped, ensure_ascii=False).encode()
        problems = loaded.problems
    write_problems(problems, folder / "written.jsonl")
    assert list(map(asdict, read_problems(folder / "written.jsonl"))) == list(map(asdict, problems))


KIND = Kind("rows", prepare, cases, read)
