"""Hostile logs end in a sentence or in the right reading: `tests/fuzz/hostile_logs.py` makes them from a seed."""

import subprocess
import sys
from pathlib import Path
from random import Random

import hostile_logs
import pytest
from hostile_logs import HOSTILE, REFUSED, TIMES, judge, judged

LARGE = {
    *("gzip_bombs", "bombs_in_tables", "xz_and_zstd_bombs", "zip_bombs", "equal_numbers", "tensors_that_are_expanded"),
    *("a_long_response", "a_hundred_thousand_columns", "thousands_of_other_files"),
}


def test_a_sample_of_hostile_logs() -> None:
    verdicts = list(judged(2026, [kind for kind in HOSTILE if kind not in LARGE], apart=False, times=1))
    assert [verdict for verdict in verdicts if verdict.fault] == []
    read = sum(" tokens; " in verdict.said for verdict in verdicts)
    assert 10 < read < len(verdicts) - 10, "both kinds are tried"


@pytest.mark.long
def test_all_hostile_logs_within_a_minute_and_two_gigabytes() -> None:
    """In a process of its own: what this one has imported would count as each log's memory."""
    ended = subprocess.run([sys.executable, hostile_logs.__file__], capture_output=True, text=True, check=False)
    *verdicts, last = ended.stdout.splitlines()
    bad = [line for line in verdicts if ": well: " not in line]
    assert ended.returncode == 0, (bad, ended.stderr)
    assert last.startswith(f"{TIMES * len(HOSTILE)} hostile logs, 0 faults") and TIMES * len(HOSTILE) >= 150


def test_the_judge_sees_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(content: str, expected: int | None) -> str:
        (tmp_path / "log.jsonl").write_text(content)
        monkeypatch.setitem(HOSTILE, "x", lambda folder, _: (folder / "log.jsonl", expected))
        return judge("x", tmp_path, Random(0), whole=False).fault

    row = '{"sampler_logprobs": [-1, -2], "trainer_logprobs": [-1, -2]}'
    assert [made(row, expected) for expected in (2, None)] == ["", ""]
    assert [made("{", expected) for expected in (REFUSED, None)] == ["", ""]
    assert made(row, 3).startswith("should have 3") and made(row, REFUSED).startswith("should have -1")
    assert made("{", 2) == "should have 2 tokens"
    monkeypatch.setattr("hostile_logs.read_log", lambda *_, **__: 1 / 0)
    assert made(row, 2) == "ZeroDivisionError"
