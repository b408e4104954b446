"""`tailrl.diagnose` of every kind of table, without the libraries of a study."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from log_fixture import SEQUENCES, plain_rows, write_lines

from tailrl import diagnose
from tailrl.diagnosis.advice import advise
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.metrics import named_metrics, quantity
from tailrl.diagnosis.page import terminal_page
from tailrl.diagnosis.readers import read_log, read_with_progress
from tailrl.diagnosis.tables import read_table
from tailrl.runtime.errors import StudyError

ROWS = plain_rows()
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
TABLES: dict[str, Callable[[], Any]] = {
    "rows": lambda: ROWS,
    "a generator": lambda: (row for row in ROWS),
    "columns": lambda: COLUMNS,
    "arrays": lambda: (
        COLUMNS | {name: [np.array(x) for x in COLUMNS[name]] for name in ("token_ids", "sampler_logprobs")}
    ),
    "tensors": lambda: (
        COLUMNS | {"trainer_logprobs": [torch.tensor(x, dtype=torch.float64) for x in COLUMNS["trainer_logprobs"]]}
    ),
    "pandas": lambda: pd.DataFrame(COLUMNS),
    "pyarrow": lambda: pa.Table.from_pylist(ROWS),
    "a record batch's table": lambda: pa.table(COLUMNS),
    "a record batch": lambda: pa.RecordBatch.from_pylist(ROWS),
}


def log_of(table: Any) -> Log:
    ((title, log),) = read_table(table)
    assert title == "the documented JSONL or Parquet"
    return log


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_table_gives_the_same_tokens(name: str) -> None:
    log = log_of(TABLES[name]())
    assert log.token_T.tolist() == [token for one in SEQUENCES for token in one["tokens"]]
    np.testing.assert_array_equal(log.trainer_T, np.concatenate([one["train"] for one in SEQUENCES]))
    assert log.reward_S.tolist() == [one["reward"] for one in SEQUENCES] and log.step_S.tolist() == [3, 3, 3]


def test_paths(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", ROWS)
    for paths in (log, str(log), [log], (str(tmp_path),)):
        assert diagnose(paths).measured.tokens == 8


def test_what_pandas_lacks_is_not_there() -> None:
    table = pd.DataFrame(ROWS[:2])
    table["text"] = ["a", None]
    table["step"] = [1, float("nan")]
    table["mask"] = [[1, 0, 0, 1], float("nan")]
    log = log_of(table)
    assert log.text_S == ("a", None) and log.step_S[0] == 1 and np.isnan(log.step_S[1]) and len(log.token_T) == 3


def test_what_pandas_calls_not_available_is_not_there() -> None:
    table = pd.DataFrame(ROWS[:2])
    table["step"] = pd.array([1, None], "Int64")
    table["text"] = pd.array(["a", None], "string")
    log = log_of(table)
    assert log.text_S == ("a", None) and log.step_S[0] == 1 and np.isnan(log.step_S[1])


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ([], "the table holds no sequence with a response"),
        ({}, "the table holds no sequence"),
        (7, "a log is a table, a dictionary of columns, rows or paths, not int"),
        ([1], "row 0: is int, not a dictionary of columns: 1"),
        ({"sampler_logprobs": [[-1.0]]}, "the table: has sampler_logprobs and no trainer_logprobs"),
        ({"sampler_logprobs": [[-1.0]], "trainer_logprobs": []}, "the columns differ in length"),
        (
            {"sampler_logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.0, -2.0]},
            "the table: sampler_logprobs has numbers and no lists; a row is one response, with a list of its tokens'",
        ),
        ([{"sampler_logprobs": [-1.0], "trainer_logprobs": None}], "row 0: trainer_logprobs is missing"),
        ("nowhere.jsonl", "nowhere.jsonl: is missing"),
    ],
)
def test_what_is_no_log_is_one_sentence(table: Any, sentence: str) -> None:
    with pytest.raises(StudyError) as raised:
        diagnose(table)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_the_diagnosis() -> None:
    found = diagnose(ROWS)
    assert quantity(found.measured, "abs_logp").mean > 0
    assert {one.name for one in found.remedies} >= {"token_tis", "mis", "dvp"} and found.advice.words


@pytest.mark.filterwarnings("error")
def test_log_probs_of_any_size_are_findings_without_warnings() -> None:
    """Fills such as −1e6, and a response whose ratio overflows."""
    rows = [
        {"sampler_logprobs": [-1e6, -1.0, -800.0], "trainer_logprobs": [-1.0, -1.0, -1.0], "reward": 1.0},
        {"sampler_logprobs": [-1.0], "trainer_logprobs": [-1e6], "reward": 0.0},
    ]
    found = diagnose(rows)
    assert found.measured.tokens == 4 and found.measured.extremes["abs_logp_max"] == 1e6 - 1
    assert all(math.isinf(one.largest) for one in found.remedies if one.name == "sequence_is")
    assert found.advice.words and len(named_metrics(found.measured)) > 20


@pytest.mark.parametrize("fill", [-1e3, -1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("side", ["sampler", "trainer", "recomputed"])
def test_a_side_that_is_filled_is_a_finding(fill: float, side: str) -> None:
    """Such ratios are too small or too large for a float."""
    rows = [{f"{name}_logprobs": [-1.0, -2.0, -0.5] for name in ("sampler", "trainer", "recomputed")}] * 3
    rows = [row | {f"{side}_logprobs": [fill] * 3} for row in rows]
    found = diagnose(rows)
    assert found.measured.tokens == 9 and found.advice.words
    assert "diagnosis" in terminal_page(found, None).lower()


def test_log_probs_that_were_recomputed_and_are_none_are_said() -> None:
    rows = [{**ROWS[0], "recomputed_logprobs": [-math.inf] * len(ROWS[0]["token_ids"])}] * 5
    found = diagnose(rows)
    assert not found.remedies and found.measured.tokens
    words = advise(found.measured, (), ()).words
    assert words == "No token has a sound recomputed log-prob: leave this column out, or log it soundly."


def test_probabilities_in_place_of_log_probs_leave_nothing() -> None:
    found = diagnose([{"sampler_logprobs": [0.5, 0.25], "trainer_logprobs": [0.5, 0.3]}])
    assert found.measured.tokens == 0 and found.measured.odd["trainer's above 0"] == 2
    assert found.advice.words == "No token has sound log-probs of both sides: log them first."


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
import tailrl
from tailrl.cli import main

found = tailrl.diagnose({path!r})
assert found.measured.tokens == 8 and found.remedies and found.advice.words
sys.argv = ["tailrl", "diagnose", {path!r}]
main()
"""
STUDY = {
    "accelerate", "datasets", "lm_eval", "math_verify", "pandas", "reasoning_gym", "safetensors",
    "snakemake", "tokenizers", "transformers", "trl", "vllm", "wandb", "wandb_workspaces",
}  # fmt: skip
"""Modules of the extra `study`, of vLLM and of TRL."""


@pytest.mark.slow  # `test_architecture.py` blocks torch
def test_without_the_libraries_of_a_study(tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "log.jsonl", ROWS))
    script = BLOCKED.format(names=STUDY, path=path)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("# Diagnosis of a log") and ended.stderr == ""


def test_a_file_is_read_with_progress(tmp_path: Path) -> None:
    """Without a terminal there is no bar; every byte is counted once."""
    log = write_lines(tmp_path / "log.jsonl", ROWS)
    other_steps = [row | {"step": 4} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(other_steps), tmp_path / "log.parquet")
    assert [len(part.token_T) for _, part in read_with_progress([tmp_path])] == [8, 8]
    for file in (log, tmp_path / "log.parquet"):
        seen: list[float] = []
        assert list(read_log([file], seen.append))
        assert sum(seen) == pytest.approx(file.stat().st_size)
