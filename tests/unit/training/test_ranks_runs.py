"""Whole runs on two ranks end like runs of one process, and each resumes from the other's checkpoints, and its own.

The trainer computes in float64, so that all numbers agree to 1e-9 of the largest. The plain engine's responses depend
only on weights and seeds.
"""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases_fixture import rest_long
from ranks_fixture import on_ranks
from run_fixture import Interrupted, Result, Runs, interrupt_at, make_runs
from safetensors.torch import load
from sampler_fixture import PlainSampler
from transformers import PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.model.policy import load_policy
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training import checkpoint_files, checkpoints, loop, scorer

TOLERANCE = 1e-9
ARMS: dict[str, dict[str, Any]] = {
    "budget": {"vocabulary": {"rule": "min_p", "rho": 0.22, "adapt": "budget", "budget": 0.05}},
    "stale": {"disturbance": {"staleness": 1, "side": "both"}, "training": {"optimizer": "sgd"}},
}


@pytest.fixture
def runs(tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    def double(folder: Path) -> PreTrainedModel:
        return load_policy(folder).double()

    def plain(*_: object) -> PlainSampler:
        sampler = PlainSampler(policy_folder)
        sampler.model.double()
        return sampler

    monkeypatch.setattr(loop, "load_policy", double)
    monkeypatch.setattr(loop, "make_sampler", plain)
    return make_runs(tmp_path, policy_folder, problems[:5], monkeypatch)


def settings(runs: Runs, arm: str) -> Run:
    return runs.settings({"sampler": {"engine": "vllm"}, **ARMS[arm]}, steps=4, token_budget=60)


def on_two_ranks(runs: Runs, run: Run, name: str = "out", expect: type[BaseException] | None = None) -> list[str]:
    """Trains; what each rank raised, where it is to raise something."""

    def rank() -> str:
        if expect is None:
            runs.train_rank(run, 5, name)
            return ""
        with pytest.raises(expect) as caught:
            runs.train_rank(run, 5, name)
        return str(caught.value)

    return on_ranks(2, runs.folder, rank)


def assert_same(found: Result, expected: Result) -> None:
    """Within the tolerance of the largest number of a metric, a weight or a token's array."""

    def close(found: Any, expected: Any, what: str) -> None:
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        assert found.shape == expected.shape, what
        scale = max(1e-30, np.nan_to_num(np.abs(expected)).max())
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * scale, err_msg=what)

    assert len(found.lines) == len(expected.lines)
    for name in expected.lines[0]:
        close([line[name] for line in found.lines], [line[name] for line in expected.lines], name)
    weights, expected_weights = load(found.policy), load(expected.policy)
    assert weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        close(weights[name], weight, name)
    assert found.tokens.keys() == expected.tokens.keys()
    for name, array in expected.tokens.items():
        dtype = {"step": np.int32, "outside": np.bool_, "logp_infer": np.float32, "logp_infer_masked": np.float32}
        close(*(np.frombuffer(data, dtype.get(name, np.float64)) for data in (found.tokens[name], array)), name)


CASES = [(before, after, arm) for before, after in ((2, 1), (1, 2)) for arm in ARMS]


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_long([(2, 1, "budget")], CASES, lambda case: "-".join(map(str, case))))
def test_a_run_goes_on_with_another_number_of_ranks(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, case: tuple[int, int, str]
) -> None:
    before, after, arm = case
    run = settings(runs, arm)
    undisturbed = runs.train(run, name="undisturbed")
    with monkeypatch.context() as patched:
        interrupt_at(patched, 3)
        if before == 2:
            on_two_ranks(runs, run, expect=Interrupted)
        else:
            with pytest.raises(Interrupted):
                runs.train_rank(run, 5, "out")
    assert [int(name.split("-")[1]) for name in runs.saved()] == [2]
    if after == 2:
        on_two_ranks(runs, run)
    else:
        runs.train_rank(run, 5, "out")
    resumed = runs.result("out")
    assert_same(resumed, undisturbed)
    assert (resumed.record["resumed_at_steps"], resumed.record["ranks"]) == ([2], after)
    assert len({line["train/grad_norm"] for line in undisturbed.lines}) == 4
    assert not runs.saved()


@pytest.mark.slow  # the test above; a half-written checkpoint is taken up in `test_checkpoint_files.py`
@pytest.mark.parametrize("after", [1, 2])
def test_ranks_killed_as_they_write_a_checkpoint_go_on_from_the_one_before(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], after: int
) -> None:
    """By SIGKILL, their parts on the disk, and the checkpoint not yet there."""
    run = runs.settings({"sampler": {"engine": "vllm"}, **ARMS["stale"]}, steps=5, token_budget=60)
    undisturbed = runs.train(run, name="undisturbed")
    with monkeypatch.context() as patched:
        own = checkpoint_files.checksum

        def killed(file: Path) -> str:
            if runs.saved():
                os.kill(os.getpid(), signal.SIGKILL)
            return own(file)

        patched.setattr(checkpoint_files, "checksum", killed)
        with pytest.raises(AssertionError, match=r"rank 0: it ended with -9\nrank 1: it ended with -9"):
            on_ranks(2, runs.folder, runs.train_rank, run, 5, "out")
    aside = runs.checkpoints / checkpoints.UNFINISHED
    assert [int(name.split("-")[1]) for name in runs.saved()] == [2] and len(list(aside.iterdir())) == 2
    on_ranks(after, runs.folder, runs.train_rank, run, 5, "out")
    assert f"tailrl: {aside}: half-written, left out\n" in capfd.readouterr().err
    resumed = runs.result("out")
    assert_same(resumed, undisturbed)
    assert (resumed.record["resumed_at_steps"], resumed.record["ranks"]) == ([2], after)


@pytest.mark.slow  # `test_ranks.py` has one update of it
def test_a_fault_on_one_rank_is_skipped_by_all(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is kept, the whole step's; later steps equal those of a single process that skipped too."""
    score = scorer.Scorer.__call__
    run = settings(runs, "budget")
    calls = {"budget": 0}

    def faulty(*arguments: Any) -> scorer.Scored:
        scored = score(*arguments)
        calls["budget"] += 1
        if calls["budget"] == 1 and distributed.number() == distributed.count() - 1:
            scored.logprobs.logp_full_T[0] = np.nan
        return scored

    monkeypatch.setattr(scorer.Scorer, "__call__", faulty)
    on_two_ranks(runs, run, "two")
    one = runs.train(run, name="one")
    two = runs.result("two")
    assert [line["train/skipped"] for line in two.lines] == [1, 0, 0, 0]
    assert_same(two, one)
    assert [file.name for file in (runs.folder / "two" / "skipped").iterdir()] == ["step-00000000.npz"]


def test_an_engine_with_the_trainers_bits_needs_one_rank(runs: Runs) -> None:
    for sentence in on_two_ranks(runs, runs.settings(), expect=StudyError):
        assert sentence == "arm test: an engine with the trainer's own bits needs the whole policy: run it with 1 rank"
