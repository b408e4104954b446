"""Two results folders are the same only if every value that a run computes is; nothing else counts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_results import compare_folders
from safetensors.numpy import load_file, save_file

RUN = "train/naive/seed0"
WEIGHTS, TOKENS, METRICS = f"{RUN}/policy/model.safetensors", f"{RUN}/tokens.npz", f"{RUN}/metrics.jsonl"
SCORES, SAMPLES = "eval/base.json", "eval/base.samples.jsonl"


def write_results(results: Path) -> None:
    """One file of each kind."""
    for folder in ("base", f"{RUN}/policy", "eval", "data"):
        (results / folder).mkdir(parents=True)
    for file in (WEIGHTS, "base/model.safetensors"):
        save_file({"weight": np.ones(3, dtype=np.float32), "zero": np.zeros(1, dtype=np.float32)}, results / file)
    np.savez(results / TOKENS, step=np.arange(3, dtype=np.int32), logp=np.zeros(3, dtype=np.float32))
    write_lines(results / METRICS, [{"train/step": n, "train/loss": float("nan"), "time/step": n} for n in range(3)])
    write_record(
        results / f"{RUN}/run.json", {"commit": "a", "settings": {"seed": 0}, "wall_seconds": 1.0, "stopped": None}
    )
    write_record(results / SCORES, {"lm_eval_version": "1", "policies": [{"seed": 0, "avg_at_k": 0.5}]})
    write_record(results / "eval/base.manifest.json", {"sources": {"a.py": "1"}})
    write_lines(results / SAMPLES, [{"id": "1+1", "responses": ["2\u2028", "3"]}])
    write_lines(results / "data/train.jsonl", [{"id": "1+1"}])


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def write_record(file: Path, record: dict[str, Any]) -> None:
    file.write_text(json.dumps(record))


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    """What puts other words into a text file."""

    def change(results: Path) -> None:
        text = (results / file).read_text()
        assert old in text
        (results / file).write_text(text.replace(old, new, 1))

    return change


def flip_last_bit(results: Path) -> None:
    data = bytearray((results / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (results / WEIGHTS).write_bytes(data)


def negative_zero(results: Path) -> None:
    save_file(load_file(results / WEIGHTS) | {"zero": np.array([-0.0], dtype=np.float32)}, results / WEIGHTS)


def tokens(**arrays: Any) -> Callable[[Path], None]:
    """What puts other arrays into tokens.npz; None removes one."""

    def change(results: Path) -> None:
        with np.load(results / TOKENS) as before:
            kept = dict(before) | arrays
        np.savez(results / TOKENS, **{name: array for name, array in kept.items() if array is not None})

    return change


def append(file: str, line: str) -> Callable[[Path], None]:
    """What adds a line to a text file, or writes a new one."""

    def change(results: Path) -> None:
        with (results / file).open("a") as opened:
            opened.write(line)

    return change


CHANGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of a weight": (flip_last_bit, f"{WEIGHTS}: differs in zero"),
    "a weight's sign of zero": (negative_zero, f"{WEIGHTS}: differs in zero"),
    "a token's number": (tokens(logp=np.array([0, 0, 1], dtype=np.float32)), f"{TOKENS}: differs in logp"),
    "a dtype": (tokens(step=np.arange(3)), f"{TOKENS}: differs in step"),
    "a shape": (tokens(step=np.arange(3, dtype=np.int32)[None]), f"{TOKENS}: differs in step"),
    "an array lost": (tokens(step=None), f"{TOKENS}: differs in step"),
    "a metric": (edit(METRICS, "NaN", "0.0"), f"{METRICS}: differs in 0.train/loss"),
    "a metric lost": (edit(METRICS, '"train/loss": NaN, ', ""), f"{METRICS}: differs in 0.train/loss"),
    "one more step": (
        append(METRICS, '{"train/step": 3}\n'),
        f"{METRICS}: differs in length; only after: 3.train/step",
    ),
    "a score": (edit(SCORES, "0.5", "0.25"), f"{SCORES}: differs in policies.0.avg_at_k"),
    "a response": (edit(SAMPLES, '"3"', '"4"'), f"{SAMPLES}: differs in 0.responses.1"),
    "a problem": (edit("data/train.jsonl", "1+1", "1+2"), "data/train.jsonl: differs in 0.id"),
    "why a run stopped": (edit(f"{RUN}/run.json", "null", '"collapse"'), f"{RUN}/run.json: differs in stopped"),
    "a file lost": (lambda results: (results / SAMPLES).unlink(), f"{SAMPLES}: only before"),
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    write_results(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    return tmp_path / "before", tmp_path / "after"


@pytest.mark.parametrize(("change", "line"), CHANGED.values(), ids=CHANGED)
def test_a_difference_is_named(
    folders: tuple[Path, Path], change: Callable[[Path], None], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = folders
    change(after)
    assert not compare_folders(before, after)
    lines = capsys.readouterr().out.splitlines()
    assert [told for told in lines if not told.endswith(": same")] == [line]


KEPT: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "nothing": (edit(METRICS, "", ""), None),
    "a time": (edit(METRICS, '"time/step": 1', '"time/step": 7'), None),
    "a version": (edit(SCORES, '"lm_eval_version": "1"', '"lm_eval_version": "2"'), None),
    "a source file": (edit("eval/base.manifest.json", '"1"', '"2"'), None),
    "a new array": (tokens(reward=np.ones(3)), f"{TOKENS}: same; only after: reward"),
    "a time of a run": (edit(f"{RUN}/run.json", "1.0", "2.0"), f"{RUN}/run.json: differs in wall_seconds"),
    "a new field": (edit(SCORES, "{", '{"new": {"a": 1}, '), f"{SCORES}: same; only after: new.a"),
    "a new file": (append("eval/new.json", "{}"), "eval/new.json: only after"),
    "where a run was made": (
        edit(f"{RUN}/run.json", '"a", "settings": {"seed": 0}', '"b", "settings": {"seed": 1, "more": 2}'),
        f"{RUN}/run.json: differs in commit, settings.seed; only after: settings.more",
    ),
}


@pytest.mark.parametrize(("change", "line"), KEPT.values(), ids=KEPT)
def test_what_no_run_computes_may_differ(
    folders: tuple[Path, Path], change: Callable[[Path], None], line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = folders
    change(after)
    assert compare_folders(before, after)
    lines = capsys.readouterr().out.splitlines()
    assert [told for told in lines if not told.endswith(": same")] == [line] * (line is not None)
    assert len(lines) == 8 + (line == "eval/new.json: only after")


@pytest.mark.parametrize("file", [WEIGHTS, TOKENS, METRICS, SCORES])
def test_a_damaged_file_is_one_sentence(folders: tuple[Path, Path], file: str) -> None:
    before, after = folders
    (after / file).write_bytes((after / file).read_bytes()[:-5])
    with pytest.raises(SystemExit, match=f"{file}: cannot be read: "):
        compare_folders(before, after)


def test_folders_without_results_are_not_the_same(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nowhere: holds no base/\*\.safetensors$"):
        compare_folders(tmp_path / "nowhere", tmp_path / "nowhere")
