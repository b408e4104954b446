"""Hostile logs end in a sentence or in the right reading: `tests/fuzz/hostile_logs.py` makes them from a seed."""

from pathlib import Path
from random import Random

import pytest
from hostile_logs import HOSTILE, REFUSED, SECONDS, TIMES, judge, judged

LARGE = {
    *("gzip_bombs", "bombs_in_tables", "xz_and_zstd_bombs", "zip_bombs", "equal_numbers", "tensors_that_are_expanded"),
    *("a_long_response", "a_hundred_thousand_columns", "thousands_of_other_files"),
}


def test_a_sample_of_hostile_logs() -> None:
    verdicts = list(judged(2026, [kind for kind in HOSTILE if kind not in LARGE], apart=False, times=1))
    assert [verdict for verdict in verdicts if verdict.fault] == []
    read = sum(" tokens; " in verdict.said for verdict in verdicts)
    assert 10 < read < len(verdicts) - 10, "both kinds are tried"


@pytest.mark.slow
def test_all_hostile_logs_within_a_minute_and_two_gigabytes() -> None:
    verdicts = list(judged(0, list(HOSTILE), apart=True))
    assert len(verdicts) == TIMES * len(HOSTILE) >= 150
    assert [verdict for verdict in verdicts if verdict.fault] == []
    assert max(verdict.seconds for verdict in verdicts) < SECONDS


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
