"""What goes wrong within a step: numbers that are none, and engines that fail or hang. Each fault is injected."""

import itertools
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from run_fixture import Runs, make_runs
from step_fixture import make_rollouts, run_of, samples_of
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.jobs import Evaluation
from tailrl.config.training import Training
from tailrl.rollout import Decoding
from tailrl.rollout.exact import ExactSampler
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import timeouts
from tailrl.runtime.errors import NumericalError, StudyError
from tailrl.runtime.timeouts import EngineError
from tailrl.tasks.problem import Problem
from tailrl.training import guarded_engine, scorer, step
from tailrl.training.optimizer import make_optimizer
from tailrl.training.samples import Sample
from tailrl.training.stopwatch import Stopwatch

FEW = {"steps": 4, "checkpoint_every": 1, "keep_tokens_every": 2}


@pytest.fixture
def runs(tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    return make_runs(tmp_path, policy_folder, problems, monkeypatch)


# --- a NaN or Inf --------------------------------------------------------------------------------------

Fault = Callable[[PreTrainedModel, Any], None]


def nan_in_a_logprob(_: PreTrainedModel, logprobs: Any) -> None:
    logprobs.logp_full_T[0] = math.nan


def inf_in_the_loss(_: PreTrainedModel, logprobs: Any) -> None:
    logprobs.logp_T.data[0] = math.inf


def inf_in_the_gradient(model: PreTrainedModel, _: Any) -> None:
    weight = next(model.parameters())

    def blow_up(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient * math.inf

    handle = weight.register_hook(blow_up)


FAULTS: dict[str, tuple[Fault, str]] = {
    "log-prob": (nan_in_a_logprob, r"the loss is \S+: the policy's log-probs are no longer finite"),
    "loss": (inf_in_the_loss, r"the loss is -?(nan|inf): the log-probs are finite, but a ratio or an advantage is not"),
    "gradient": (inf_in_the_gradient, r"the gradient's norm is (nan|inf)"),
}


@pytest.mark.parametrize("correction", [{"token": "mask"}, {"sequence": "geometric"}, {"veto": 1e-4}])
def test_a_log_prob_of_the_sampler_that_is_none_is_refused(model: PreTrainedModel, correction: dict[str, Any]) -> None:
    """With a rejection the loss stays finite."""
    run = run_of({"correction": correction})
    rollouts, advantages = make_rollouts()
    rollouts[0].logp_sampler_T[0] = np.nan
    optimizer = make_optimizer(model, run.training)
    with pytest.raises(StudyError, match="a log-prob of the sampler is not finite"):
        step.update(model, optimizer, samples_of(rollouts, advantages, run), run, 0, Stopwatch())


@pytest.mark.parametrize("correction", [{"token": "is"}, {"sequence": "is"}])
def test_a_weight_that_overflows_skips_the_update_where_its_token_is_kept(
    model: PreTrainedModel, correction: dict[str, Any]
) -> None:
    """A fault of numbers, which the loop counts and survives; beside a veto the response weighs 0."""
    rollouts, advantages = make_rollouts()
    rollouts[0].logp_sampler_T[0] = -200.0
    for own, refused in ((correction, True), ({**correction, "veto_above": 1e6}, False)):
        run = run_of({"correction": own})
        given = (make_optimizer(model, run.training), samples_of(rollouts, advantages, run), run, 0, Stopwatch())
        if refused:
            with pytest.raises(NumericalError, match="beyond float32"):
                step.update(model, *given)
            model.zero_grad()
        else:
            assert all(math.isfinite(number) for number in step.update(model, *given)[:2])


def inject(monkeypatch: pytest.MonkeyPatch, fault: Fault, *steps: int) -> None:
    """The fault comes in the forward pass of these steps; one update a step, in one micro-batch."""
    score, count = scorer.Scorer.__call__, iter(range(100))

    def faulty(self: scorer.Scorer, model: PreTrainedModel, samples: Sequence[Sample]) -> scorer.Scored:
        scored = score(self, model, samples)
        if next(count) in steps:
            fault(model, scored.logprobs)
        return scored

    monkeypatch.setattr(scorer.Scorer, "__call__", faulty)


@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_skips_the_update_and_keeps_the_batch(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    fault, reason = FAULTS[where]
    run = runs.settings(**FEW, token_budget=10_000)
    weights: list[dict[str, Tensor]] = []
    hand_over = ExactSampler.load_weights

    def load(self: ExactSampler, given: Any) -> None:
        weights.append({name: weight.clone() for name, weight in given})
        hand_over(self, weights[-1].items())

    monkeypatch.setattr(ExactSampler, "load_weights", load)
    inject(monkeypatch, fault, 0, 2)
    result = runs.train(run)
    assert [line["train/skipped"] for line in result.lines] == [1, 0, 1, 0]
    # The weights before the first step, and after every step.
    moved = [any((a[name] != b[name]).any() for name in a) for a, b in itertools.pairwise(weights)]
    assert moved == [False, True, False, True]
    for line, skipped in zip(result.lines, (True, False, True, False), strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout_corr/k3_kl", "dvp/lost_mass_per_response"):
            assert (line[name] is None) == skipped
        assert line["reward/mean"] is not None and line["response/length_mean"]
    # The first step that is not skipped is kept in place of step 0.
    assert set(np.frombuffer(result.tokens["step"], np.int32)) == {1}

    said = [sentence for sentence in capsys.readouterr().err.splitlines() if "skipped" in sentence]
    files = [runs.folder / "out" / "skipped" / f"step-{number:08d}.npz" for number in (0, 2)]
    for sentence, number, file in zip(said, (0, 2), files, strict=True):
        where_it_was = f"tailrl: arm test, seed 5, step {number}: the update is skipped, for "
        assert re.fullmatch(f"{re.escape(where_it_was)}{reason}; its batch is in {re.escape(str(file))}", sentence)
    with np.load(files[0], allow_pickle=False) as batch:
        assert batch["response_length_N"].sum() == len(batch["tokens_T"]) == len(batch["logp_infer_T"])
        assert batch["prompt_length_N"].sum() == len(batch["prompt_tokens"])
        assert len(batch["advantage_N"]) == len(batch["seed_N"]) == 8
        assert batch["response_length_N"].mean() == result.lines[0]["response/length_mean"]


def test_a_skipped_update_leaves_the_optimizer_and_the_thresholds(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments and the count of AdamW: else the next update would be another."""
    budget = {"vocabulary": {"rule": "min_p", "rho": 0.22, "adapt": "budget", "budget": 0.05}}
    run = runs.settings(budget, **{**FEW, "steps": 3}, token_budget=10_000)
    inject(monkeypatch, nan_in_a_logprob, 1)
    states = []
    update = step.optimizer_step

    def spy(model: PreTrainedModel, optimizer: torch.optim.Optimizer, limit: float) -> float:
        norm = update(model, optimizer, limit)
        states.append(optimizer.state_dict()["state"][0]["step"].item())
        return norm

    monkeypatch.setattr(step, "optimizer_step", spy)
    lines = runs.train(run).lines
    assert states == [1, 2]
    thresholds = [line["dvp/threshold"] for line in lines]
    assert thresholds[0] != thresholds[1] == thresholds[2]


def test_faults_in_a_row_stop_the_run_with_its_state_saved(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.settings(**{**FEW, "steps": 6, "checkpoint_every": 4}, max_skipped=2, token_budget=10_000)
    with monkeypatch.context() as patched:
        inject(patched, nan_in_a_logprob, 0, 2, 3)
        with pytest.raises(StudyError) as caught:
            runs.train(run)
    (saved,) = runs.saved()
    batch = runs.folder / "out" / "skipped" / "step-00000003.npz"
    sentence = str(caught.value)
    assert sentence.startswith("arm test, seed 5, step 3: the update is skipped, for the loss is ")
    assert sentence.endswith(
        f"its batch is in {batch}; 2 in a row: the run stops, its state is in {runs.checkpoints / saved}"
    )
    assert batch.is_file() and int(saved.split("-")[1]) == 4
    resumed = runs.train(run)
    assert [line["train/skipped"] for line in resumed.lines] == [1, 0, 1, 1, 0, 0]


def test_a_run_that_stopped_in_its_last_step_is_not_finished_by_starting_it_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.settings(**{**FEW, "steps": 2}, max_skipped=3, token_budget=10_000)
    inject(monkeypatch, nan_in_a_logprob, 0, 1)
    with pytest.raises(StudyError, match=r"; 2 in a row: the run stops"):
        runs.train(run)
    for _ in range(2):
        with pytest.raises(StudyError, match=r"out: the last 2 updates were skipped for a NaN or Inf$"):
            runs.train(run)


# --- an engine that fails or hangs ---------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *calls: int) -> list[int]:
    """The engine raises in these calls of `generate`, not counting its self-test; the list holds the calls made."""
    generate, made = ExactSampler.generate, [0]
    monkeypatch.setattr(ExactSampler, "self_test", lambda *_: 0.0)

    def fail(self: ExactSampler, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        made[0] += 1
        if made[0] - 1 in calls:
            raise error
        return generate(self, requests, decoding)

    monkeypatch.setattr(ExactSampler, "generate", fail)
    return made


@pytest.mark.parametrize("staleness", rest_long((1,), (0, 1)))
def test_an_engine_that_fails_is_restarted_and_the_step_repeated(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], staleness: int
) -> None:
    run = runs.settings({"disturbance": {"staleness": staleness}}, **FEW)
    undisturbed = runs.undisturbed(run)
    # In the first step, which is then repeated, and in the last one.
    made = failing(monkeypatch, RuntimeError("the engine core died\nits last words\n"), 0, 4)
    assert runs.train(run).same(undisturbed)
    sentence = "tailrl: the engine failed and is restarted, its batch repeated: RuntimeError: the engine core died | "
    assert capsys.readouterr().err.count(f"{sentence}its last words\n") == 2
    assert made == [6]


def test_a_restarted_engine_is_tested_and_forgets_its_test(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its weights before the test, which compares them, and once more after it."""
    failing(monkeypatch, RuntimeError("the engine core died"), 1)
    calls: list[str] = []

    def noted(name: str) -> None:
        inner = getattr(ExactSampler, name)

        def call(self: ExactSampler, given: Sequence[Any], *more: Any) -> Any:
            calls.append(f"{name} {len(given)}" if name != "load_weights" else name)
            return inner(self, given, *more)

        monkeypatch.setattr(ExactSampler, name, call)

    for name in ("load_weights", "self_test", "generate"):
        noted(name)
    runs.train(runs.settings(**{**FEW, "steps": 2}))
    first, batch, weights = ["load_weights", "self_test 8"], calls[2], "load_weights"
    again = [batch, weights, "self_test 4", weights, batch]
    assert calls == [*first, batch, weights, *again, weights]


def test_an_engine_that_fails_twice_ends_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RuntimeError("a", "long story"), *range(100))
    with pytest.raises(StudyError, match=r"^the engine failed twice in the same batch: RuntimeError: "):
        runs.train(runs.settings(**FEW))


def test_an_engine_beside_a_sharded_policy_ends_the_process(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a code that starts all ranks once more."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    failing(monkeypatch, RuntimeError("the engine core died"), 0)
    monkeypatch.setattr(guarded_engine, "is_sharded", lambda _: True)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as caught:
        runs.train(runs.settings(**FEW))
    assert caught.value.code == os.EX_SOFTWARE
    assert "tailrl: rank 0: the engine failed: RuntimeError: the engine core died\n" in capsys.readouterr().err


def test_bad_input_is_not_retried(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    made = failing(monkeypatch, StudyError("a prompt of 99 tokens leaves no room"), *range(100))
    with pytest.raises(StudyError, match=r"^a prompt of 99 tokens leaves no room$"):
        runs.train(runs.settings(**FEW))
    assert made == [1]


CALLS = {
    "load_weights": "the hand-over of the weights failed: RuntimeError: the engine core died | its last words",
    "self_test": "the engine's self-test failed: RuntimeError: the engine core died | its last words",
    "__init__": "the engine's start failed: RuntimeError: the engine core died | its last words",
}


@pytest.mark.parametrize(("call", "time"), [*((call, 1) for call in CALLS), ("load_weights", 3)])
def test_an_engine_that_fails_elsewhere_leaves_it_to_another_process(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, call: str, time: int
) -> None:
    """In its first call, or in a later one; what was done until then is kept."""
    undisturbed, made = runs.undisturbed(runs.settings(**FEW)), itertools.count(1)
    own = getattr(ExactSampler, call)

    def fail(*arguments: Any, **others: Any) -> Any:
        if next(made) == time:
            raise RuntimeError("the engine core died\nits last words\n")
        return own(*arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr(ExactSampler, call, fail)
        with pytest.raises(EngineError) as caught:
            runs.train(runs.settings(**FEW))
    assert str(caught.value) == CALLS[call]
    resumed = runs.train(runs.settings(**FEW))
    assert resumed.same(undisturbed) and resumed.record["resumed_at_steps"] == ([1] if time > 1 else [])


def test_every_call_of_an_engine_has_a_deadline(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that fails in a batch too, and the new one."""
    limits: list[tuple[float, str]] = []

    @contextmanager
    def note(seconds: float, what: str) -> Iterator[None]:
        limits.append((seconds, what))
        yield

    monkeypatch.setattr(timeouts, "deadline", note)
    monkeypatch.setattr(guarded_engine, "deadline", note)
    made = failing(monkeypatch, RuntimeError("died"), 1)
    monkeypatch.setattr(ExactSampler, "self_test", lambda *_: 0.0)
    run = runs.settings(**{**FEW, "steps": 2, "rollout_timeout": 77.0})
    runs.train(run)
    assert made == [3] and {seconds for seconds, _ in limits} == {77.0}
    responses = run.training.prompts * run.training.group_size
    start, weights, batch = "the engine's start", "the hand-over of the weights", f"a batch of {responses} responses"
    sleep = "the engine's sleep"
    test = "the engine's self-test"
    again = ["the end of the engine that failed", start, weights, test, weights, batch]
    assert [what for _, what in limits] == [start, weights, test, batch, sleep, weights, batch, *again, sleep, weights]


@pytest.mark.parametrize("block", ["training", "evaluation"])
def test_the_longest_deadline_fits_the_systems_timers(block: str) -> None:
    """30 days: beyond some hundred years the system's timers overflow."""
    with timeouts.deadline(timeouts.MONTH, "a batch"):
        pass
    kind = {"training": Training, "evaluation": Evaluation}[block]
    with pytest.raises(ValueError, match="rollout_timeout"):
        kind.model_validate({"rollout_timeout": 1e10})


HANGING = {
    "asleep": "time.sleep(60)",
    # A call into C that keeps the interpreter's lock: no other thread of Python's runs.
    "holding the lock": "ctypes.PyDLL(None).sleep(60)",
}


@pytest.mark.parametrize("how", rest_long(("asleep",), HANGING))
def test_an_engine_that_hangs_ends_the_process_in_time(how: str) -> None:
    grace = 10.0 if how == "asleep" else 1.0
    script = (
        f"import ctypes, time\nfrom tailrl.runtime import timeouts\ntimeouts.GRACE = {grace}\n"
        f"with timeouts.deadline(1.0, 'a batch of 8 responses'):\n    {HANGING[how]}\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == (os.EX_SOFTWARE if how == "asleep" else -signal.SIGALRM)
    assert "<string>" in ended.stderr, "the stack says where"
    sentence = "tailrl: a batch of 8 responses took longer than 1 s: the engine hangs\n"
    assert ended.stderr.startswith(sentence if how == "asleep" else "Timeout (0:00:02)!\n")


def test_a_call_that_ends_in_time_is_left_alone() -> None:
    script = (
        "import time\nfrom tailrl.runtime import timeouts\ntimeouts.GRACE = 0.1\n"
        "with timeouts.deadline(2.0, 'a batch'): pass\ntime.sleep(2.4)\nprint('done')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
