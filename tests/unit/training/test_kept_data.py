"""Metrics and tokens that a run has kept so far: damage gets into no result, and costs no checkpoint."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Interrupted, Runs, interrupt_at, make_runs

from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training import loop
from tailrl.training.kept_data import KeptMetrics, KeptTokens


@pytest.fixture
def runs(tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    return make_runs(tmp_path, policy_folder, problems, monkeypatch)


Which = Callable[[KeptMetrics, KeptTokens], Path]
DAMAGE: dict[str, tuple[Which, Callable[[bytes], bytes], str]] = {
    "metrics with one digit changed": (lambda m, _: m.file, lambda b: b.replace(b"1.0", b"1.5", 1), "the metrics in "),
    "metrics that are no text": (lambda m, _: m.file, lambda b: b"\xff" + b[1:], "the metrics in "),
    "metrics cut short": (lambda m, _: m.file, lambda b: b[: len(b) // 2], "the metrics in "),
    "tokens with one bit changed": (
        lambda _, t: t.folder / f"tokens-00000000-{t.name}.safetensors",
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        "the tokens of step 0 in ",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_while_a_run_goes_on_gets_into_no_result(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    which, change, words = DAMAGE[damage]
    take_step = loop.take_step

    def spoil(job: Any, state: Any, *others: Any) -> Any:
        if state.step == 6:
            file = which(state.metrics, state.tokens)
            file.write_bytes(change(file.read_bytes()))
        return take_step(job, state, *others)

    monkeypatch.setattr(loop, "take_step", spoil)
    with pytest.raises(StudyError, match=words + r"\S+ are damaged$"):
        runs.train(runs.settings())
    assert not list(runs.checkpoints.glob("finished-*"))


def test_checkpoints_are_kept_where_all_of_them_rest_on_damage(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """To put the file back is the user's to do, and to train days again the user's to decide."""
    undisturbed = runs.undisturbed(runs.settings())
    interrupt_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        runs.train(runs.settings())
    saved = runs.saved()
    (metrics,) = runs.checkpoints.glob("metrics-*")
    whole = metrics.read_bytes()
    metrics.write_bytes(b"x" + whole[1:])
    words = rf"{metrics}: damaged, and none of this run's checkpoints \(2\) can be used; put it back from a copy"
    with pytest.raises(StudyError, match=words):
        runs.train(runs.settings())
    assert runs.saved() == saved
    metrics.write_bytes(whole)
    resumed = runs.train(runs.settings())
    assert resumed.same(undisturbed) and resumed.record["resumed_at_steps"] == [4]


def test_a_file_that_cannot_be_read_now_costs_no_checkpoint(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        runs.train(runs.settings())
    saved, opened = runs.saved(), Path.open

    def refuse(self: Path, *arguments: Any, **others: Any) -> Any:
        if self.name.startswith("metrics-") and arguments == ("rb",):
            raise OSError(errno.EIO, "Input/output error")
        return opened(self, *arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(StudyError, match=r"metrics-\w+\.jsonl: cannot be read: Input/output error$"):
            runs.train(runs.settings())
    assert runs.saved() == saved
    assert runs.train(runs.settings()).record["resumed_at_steps"] == [4]
