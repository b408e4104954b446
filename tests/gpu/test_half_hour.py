"""The script for a first half hour on a GPU: what it starts, notes and goes on with."""

import ast
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import gpu_speed
import half_hour
import pytest

ROOT = Path(__file__).parents[2]
ROWS = half_hour.rows()


def lines(out: Path) -> list[tuple[str, str]]:
    """Row and verdict of each line that calls left."""
    with (out / "rows.csv").open(encoding="utf-8", newline="") as file:
        return [(line["row"], line["verdict"]) for line in csv.DictReader(file)]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a call."""
    monkeypatch.setattr(sys, "argv", ["half_hour", *arguments])
    try:
        half_hour.main()
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Two short rows that append a word to a file; the second ends with 75 until it has done so twice."""
    script = tmp_path / "row.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1]); file.open('a').write(sys.argv[2] + ' ')\n"
        "print('said', sys.argv[2], os.environ.get('OWN'))\n"
        "sys.exit(75 if sys.argv[2] == 'b' and file.read_text().count('b') < 2 else 0)\n"
    )
    made = [
        {"name": name, "minutes": 1, "command": [str(script), "{out}/words.txt", name], "other": ["nothing"]}
        for name in ("a", "b")
    ]
    made[0]["environment"] = {"OWN": "variable"}
    monkeypatch.setattr(half_hour, "rows", lambda: made)
    return made


def test_every_row_is_a_program_that_takes_its_arguments() -> None:
    """Of both forms; the checks that are asked for are there."""
    assert len({row["name"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["minutes"] > 0 and row["other"], row["name"]
        for words in (row["command"], row.get("rehearse") or row["command"]):
            assert (ROOT / words[0]).is_file(), words
            ast.parse((ROOT / words[0]).read_text(encoding="utf-8"))
            if words[0].endswith("gpu_check.py"):
                part = words[words.index("--only") + 1]
                assert any(part in name for name in gpu_check.CHECKS), part
            if words[0].endswith("gpu_speed.py"):
                assert words[1] in gpu_speed.MEASURES
                given = gpu_speed.parser().parse_args(words[1:])
                assert given.policy in (*gpu_speed.KNOWN, "small")


@pytest.mark.usefixtures("rows")
def test_a_call_goes_on_behind_the_rows_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert call(monkeypatch, str(out), "--rehearse", "--seconds", "0") == half_hour.UNFINISHED
    assert not (out / "rows.csv").exists(), "no time for a row"
    assert call(monkeypatch, str(out), "--rehearse") == half_hour.UNFINISHED
    assert call(monkeypatch, str(out), "--rehearse") == 0 == call(monkeypatch, str(out), "--rehearse")
    assert lines(out) == [("a", "done"), ("b", "unfinished"), ("b", "done")]
    assert (out / "words.txt").read_text() == "a b b "
    assert (out / "logs/00.txt").read_text() == "said a variable\n"


@pytest.mark.slow
def test_a_row_that_failed_or_took_too_long_is_noted_and_the_next_is_made(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    broken = {"name": "broken", "minutes": 1, "command": [f"{tmp_path}/none.py"], "other": ["nothing"]}
    rows[:] = [broken, {**broken, "name": "endless", "minutes": 0.05, "command": [str(endless)]}, rows[0]]
    out = tmp_path / "out"
    assert call(monkeypatch, str(out)) == 0
    assert lines(out) == [("broken", "failed with 2"), ("endless", "out of time"), ("a", "done")]
    assert call(monkeypatch, str(out)) == 0 and len(lines(out)) == 3, "what failed is not made again by itself"
    assert call(monkeypatch, str(out), "--again", "--only", "broken") == 0
    assert lines(out)[3:] == [("broken", "failed with 2")]


def test_a_rehearsal_says_which_rows_need_a_gpu(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows[:] = [{**rows[0], "rehearse": []}, rows[0] | {"name": "with its command"}]
    out = tmp_path / "out"
    assert call(monkeypatch, str(out), "--rehearse") == 0 == call(monkeypatch, str(out), "--rehearse")
    assert lines(out) == [("a", "needs a GPU"), ("with its command", "done")]
    assert (out / "words.txt").read_text() == "a "


def test_wheels_in_parts_are_joined(tmp_path: Path) -> None:
    wheels, into = tmp_path / "wheels", tmp_path / "into"
    wheels.mkdir()
    into.mkdir()
    (wheels / "a-1-py3-none-any.whl").write_bytes(b"whole")
    for number, part in enumerate((b"to", b"get", b"her")):
        (wheels / f"b-1-py3-none-any.whl.{number:02}").write_bytes(part)
    found = half_hour.join_parts(wheels, into)
    assert [file.name for file in found] == ["a-1-py3-none-any.whl", "b-1-py3-none-any.whl"]
    assert found[1].read_bytes() == b"together"
    (wheels / "b-1-py3-none-any.whl.01").unlink()
    with pytest.raises(ValueError, match=r"^b-1-py3-none-any\.whl: a part is missing; there are .*00, .*02$"):
        half_hour.join_parts(wheels, into)


@pytest.mark.long
@pytest.mark.vllm
def test_a_rehearsal_of_the_speeds(tmp_path: Path) -> None:
    """Our step, bare vLLM and TRL, each in a process of its own; their rows stand in one table."""
    command = [sys.executable, str(ROOT / "tests/gpu/half_hour.py"), str(tmp_path), "--rehearse", "--only", "0.6B"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with (tmp_path / "speed.csv").open(encoding="utf-8", newline="") as file:
        found = {line["measure"]: line for line in csv.DictReader(file)}
    assert list(found) == ["ours", "bare", "trl"] and {line["device"] for line in found.values()} == {"CPU"}
    assert min(float(found["ours"][phase]) for phase in ("step", "rollout", "backward", "floor_step")) > 0
    assert float(found["bare"]["rollout_tokens_per_second"]) > 0 < float(found["trl"]["step"])
