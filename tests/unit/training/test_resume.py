"""A run that is interrupted ends as it would have ended, to the bit; what it cannot go on from is named."""

import errno
import json
import os
import pickle
import platform
import random
import resource
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from run_fixture import Interrupted, Result, Runs, interrupt_at, make_runs
from safetensors import safe_open
from transformers.utils import chat_template_utils

from tailrl.artifacts.metrics import read_steps
from tailrl.config.curriculum import Curriculum
from tailrl.model.policy import load_policy, load_tokenizer, save_policy
from tailrl.rollout import Sampler
from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems
from tailrl.training import checkpoints, loop, step
from tailrl.training.checkpoint_files import HEADER
from tailrl.training.checkpoints import Checkpoints, fingerprint
from tailrl.training.state import seed_libraries

MIN_P: dict[str, Any] = {"rule": "min_p", "rho": 0.22}
# Each has a state that another one has not.
ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "stale": {"disturbance": {"staleness": 2, "weights": "bfloat16"}},
    "budget": {"vocabulary": {**MIN_P, "adapt": "budget", "budget": 0.05}},
    "difficulty": {"vocabulary": {**MIN_P, "adapt": "difficulty", "rho_easy": 0.6}},
    "transformers": {"sampler": {"engine": "transformers"}},
    "minibatches": {"clip": {"ratio": "decoupled"}, "training": {"minibatches": 3, "weight_decay": 0.1}},
    "sgd": {"correction": {"sequence": "mis"}, "training": {"optimizer": "sgd", "loss_mean": "kept"}},
}


@pytest.fixture
def runs(tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    # Few problems, so that the steps go through them more than once.
    return make_runs(tmp_path, policy_folder, problems[:5], monkeypatch)


def interrupted(runs: Runs, *arguments: Any, **others: Any) -> None:
    with pytest.raises(Interrupted):
        runs.train(*arguments, **others)


# --- to the bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", rest_long(("stale", "budget"), ARMS))
def test_an_interrupted_run_ends_as_an_undisturbed_one(runs: Runs, monkeypatch: pytest.MonkeyPatch, arm: str) -> None:
    """Before its first checkpoint, after one, once more without any progress, and in its last step."""
    run = runs.settings(ARMS[arm])
    undisturbed = runs.undisturbed(run)
    # The interrupted processes end in steps 1, 3, 3 and 6; a checkpoint is made after every second step.
    interrupt_at(monkeypatch, 1, 3, 3, 6)
    for _ in range(4):
        interrupted(runs, run)
    resumed = runs.train(run)
    assert resumed.same(undisturbed)
    assert [line["train/step"] for line in resumed.lines] == list(range(7))
    assert (undisturbed.record["resumed_at_steps"], resumed.record["resumed_at_steps"]) == ([], [2, 6])
    assert resumed.record["wall_seconds"] > resumed.record["startup_seconds"] > 0
    assert {path.name.partition("-")[0] for path in runs.checkpoints.iterdir()} == {"lock", "finished"}
    if arm in ("budget", "difficulty"):
        assert len({line["dvp/threshold"] for line in resumed.lines}) > 3, "the thresholds move"
    assert undisturbed.lines[-1]["train/grad_norm"]
    assert len(read_steps(runs.folder / "out")) == 7, "no value is out of its metric's range"


class Remembering:
    """An engine whose numbers are other ones where it has cached keys, as those of vLLM may be.

    It has cached some after each batch and each test, and forgets them with new weights.
    """

    def __init__(self, engine: Sampler) -> None:
        self.engine = engine
        self.caches = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def load_weights(self, weights: Any) -> None:
        self.engine.load_weights(weights)
        self.caches = False

    def self_test(self, *arguments: Any) -> float:
        error = self.engine.self_test(*arguments)
        self.caches = True
        return error

    def generate(self, requests: Any, decoding: Any) -> list[Rollout]:
        rollouts = self.engine.generate(requests, decoding)
        if self.caches:
            rollouts = [replace(one, logp_sampler_T=one.logp_sampler_T - np.float32(1e-3)) for one in rollouts]
        self.caches = True
        return rollouts


def test_a_run_that_goes_on_has_nothing_cached_of_its_engines_test(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An undisturbed run has just handed over new weights there."""
    make = loop.make_sampler
    monkeypatch.setattr(loop, "make_sampler", lambda *arguments: Remembering(make(*arguments)))
    run = runs.settings(steps=4)
    undisturbed = runs.train(run, name="cached")
    interrupt_at(monkeypatch, 3)
    interrupted(runs, run)
    resumed = runs.train(run)
    assert resumed.record["resumed_at_steps"] == [2]
    assert resumed.same(undisturbed)
    sizes = [line["rollout_corr/k3_kl"] for line in undisturbed.lines]
    assert sizes[0] and sizes[1:] == [0.0] * 3, "the first step alone follows a test"


def test_a_run_that_has_reached_a_harder_task_goes_on_with_it(
    tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before the task changes, at the change, and after it."""
    levels = [replace(problem, level=place % 3) for place, problem in enumerate(problems[:9])]
    runs = make_runs(tmp_path, policy_folder, levels, monkeypatch)
    harder = {"harder": [{"name": "arithmetic"}] * 2, "above": 0.01, "window": 2}
    run = runs.settings().model_copy(update={"curriculum": Curriculum.model_validate(harder)})
    undisturbed = runs.train(run, name="undisturbed")
    interrupt_at(monkeypatch, 1, 3, 5)
    for _ in range(3):
        interrupted(runs, run)
    resumed = runs.train(run)
    assert resumed.same(undisturbed)
    assert [line["curriculum/level"] for line in resumed.lines] == [0, 0, 1, 1, 2, 2, 2]
    assert resumed.record["resumed_at_steps"] == [2, 4]


def test_checkpoints_change_nothing(runs: Runs) -> None:
    """Between every two steps, and never."""
    often, never = (runs.train(runs.settings(checkpoint_every=n), name=str(n)) for n in (1, 1000))
    assert often.same(never)


def test_a_librarys_own_draws_are_repeated(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout in a policy, or a task that shuffles: their generators depend on seed and step."""
    own = step.rewards

    def noisy(*arguments: Any) -> np.ndarray:
        return own(*arguments) + 0.1 * (torch.rand(1).item() + np.random.rand() + random.random())

    monkeypatch.setattr(step, "rewards", noisy)
    undisturbed = runs.train(runs.settings(), name="undisturbed")
    interrupt_at(monkeypatch, 5)
    interrupted(runs, runs.settings())
    assert runs.train(runs.settings()).same(undisturbed)
    assert len({line["reward/mean"] for line in undisturbed.lines}) == 7


def test_the_generators_are_seeded() -> None:
    drawn = []
    for seed in (1, 1, 2):
        seed_libraries(seed)
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


# --- files ---------------------------------------------------------------------------------------------


@pytest.fixture
def at_four(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """A run that was interrupted after the checkpoints of steps 2 and 4."""
    interrupt_at(monkeypatch, 5)
    interrupted(runs, runs.settings())
    return runs


@pytest.fixture
def undisturbed(runs: Runs) -> Result:
    return runs.undisturbed(runs.settings())


def test_the_last_checkpoints_are_kept(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for keep, steps in ((1, [5]), (3, [3, 4, 5])):
        interrupt_at(monkeypatch, 5)
        interrupted(runs, runs.settings(checkpoint_every=1, keep_checkpoints=keep))
        assert [int(name.split("-")[1]) for name in runs.saved()] == steps
        Checkpoints(runs.checkpoints, 1, {}).clear()


def test_a_checkpoint_is_safetensors_and_nothing_is_unpickled(
    at_four: Runs, undisturbed: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in at_four.saved():
        header = json.loads((at_four.checkpoints / name / HEADER).read_bytes())
        assert header["numbers"]["step"] == int(name.split("-")[1])
        (part,) = header["parts"]
        with safe_open(at_four.checkpoints / name / part, framework="pt") as opened:
            exact = ["optimizer.0.exp_avg", "optimizer.0.exp_avg_sq", "optimizer.0.step"]
            assert {"model.model.embed_tokens.weight", *exact} <= set(opened.keys())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert at_four.train(at_four.settings()).same(undisturbed)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_run_resumed_before_a_damaged_checkpoint_ends_the_same(
    at_four: Runs, undisturbed: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else may be wrong with one: `test_bad_checkpoints.py`."""
    first, last = at_four.saved()
    (part,) = (at_four.checkpoints / last).glob("*.safetensors")
    flip(part)
    resumed = at_four.train(at_four.settings())
    said = capsys.readouterr().err
    assert f"{at_four.checkpoints / last}: its part {part.name} is damaged" in said
    assert f"{at_four.checkpoints / first}: the run goes on from step 2\n" in said
    assert resumed.same(undisturbed) and resumed.record["resumed_at_steps"] == [2]


def test_without_a_whole_checkpoint_a_run_waits_for_a_decision(at_four: Runs, undisturbed: Result) -> None:
    """And is trained from its first step where the folder is removed."""
    for name in at_four.saved():
        flip(at_four.checkpoints / name / HEADER)
    with pytest.raises(StudyError, match=rf"or remove {at_four.checkpoints} to train from the first step$"):
        at_four.train(at_four.settings())
    assert len(at_four.saved()) == 2
    shutil.rmtree(at_four.checkpoints)
    again = at_four.train(at_four.settings())
    assert again.same(undisturbed) and again.record["resumed_at_steps"] == []


def test_a_full_disk_leaves_the_last_checkpoint(
    runs: Runs, undisturbed: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system itself refuses: a file may have no more than 1 kB in the second checkpoint."""
    write, saved = checkpoints.write_parts, list[Path]()

    def full(tensors: Any, folder: Path) -> Any:
        saved.append(folder)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if len(saved) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            return write(tensors, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(checkpoints, "write_parts", full)
    words = (
        r"the checkpoint of step 4 could not be saved \(.*File too large.*\): it needs "
        r"(\d+\.\d) MB, and \d+\.\d MB are free; step-00000002-\w+-\w+ is kept$"
    )
    with pytest.raises(StudyError, match=words) as caught:
        runs.train(runs.settings())
    (kept,) = runs.saved()
    needed = float(str(caught.value).partition("it needs ")[2].partition(" MB")[0])
    size = sum(file.stat().st_size for file in (runs.checkpoints / kept).iterdir())
    assert needed == pytest.approx(size / 1e6, rel=0.2)
    monkeypatch.setattr(checkpoints, "write_parts", write)
    resumed = runs.train(runs.settings())
    assert resumed.same(undisturbed) and resumed.record["resumed_at_steps"] == [2]


# --- whose checkpoint it is ----------------------------------------------------------------------------


def test_a_changed_setting_starts_anew_and_one_changed_back_goes_on(
    at_four: Runs, undisturbed: Result, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, saved = at_four.settings(learning_rate=2e-2), at_four.saved()
    interrupt_at(monkeypatch, 3)
    interrupted(at_four, other)
    assert f"{saved[-1]}: of a run with other settings; training starts anew\n" in capsys.readouterr().err
    assert set(saved) < set(at_four.saved())
    resumed = at_four.train(at_four.settings())
    assert resumed.same(undisturbed) and resumed.record["resumed_at_steps"] == [4]


def test_operational_settings_may_be_changed(at_four: Runs, undisturbed: Result) -> None:
    run = at_four.settings(checkpoint_every=3, keep_checkpoints=1, max_skipped=9, rollout_timeout=9.0)
    resumed = at_four.train(run)
    assert resumed.same(undisturbed) and resumed.record["resumed_at_steps"] == [4]


def test_the_fingerprint_knows_what_a_run_depends_on(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[Problem]
) -> None:
    file, policy = runs.folder / "problems.jsonl", tmp_path / "policy"
    model, tokenizer = load_policy(runs.policy), load_tokenizer(runs.policy)
    save_policy(model, tokenizer, policy)
    run = runs.settings()
    prompts = [(1, 2), (3,)]
    first = fingerprint(run, 5, policy, file, prompts)

    def differing(*arguments: Any, prompts: list[tuple[int, ...]] = prompts) -> list[str]:
        again = fingerprint(*arguments, prompts)
        return [name for name in first if first[name] != again[name]]

    assert differing(run, 5, policy, file) == []
    assert differing(run, 6, policy, file) == ["seed"]
    assert differing(run, 5, policy, file, prompts=[(1,), (2, 3)]) == ["prompts"]
    assert differing(runs.settings(ARMS["budget"]), 5, policy, file) == ["settings"]
    write_problems(problems[:6], tmp_path / "others.jsonl")
    assert differing(run, 5, policy, tmp_path / "others.jsonl") == ["problems"]
    source = tmp_path / "source.py"
    source.write_text("")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "job_files", lambda *_: (str(source),))
        assert differing(run, 5, policy, file) == ["source files"]
    with monkeypatch.context() as patched:
        versions = dict.fromkeys(("python", "torch", "transformers", "vllm"), "0")
        patched.setattr(checkpoints, "provenance", lambda: {"versions": versions})
        assert differing(run, 5, policy, file) == ["library versions"]
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    save_policy(model, tokenizer, policy)
    assert differing(run, 5, policy, file) == ["base policy"]


DATED = "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m['content'] }}{% endfor %}"


def on_the_day(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """The date that a chat template writes into every prompt."""
    monkeypatch.setattr(
        chat_template_utils, "datetime", SimpleNamespace(now=lambda: SimpleNamespace(strftime=lambda _: day))
    )


def test_a_prompt_with_the_date_is_another_runs_on_the_next_day(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_policy(runs.policy), load_tokenizer(runs.policy)
    tokenizer.chat_template = DATED
    save_policy(model, tokenizer, tmp_path / "dated")
    dated = replace(runs, policy=tmp_path / "dated")
    on_the_day(monkeypatch, "1 Jan")
    interrupt_at(monkeypatch, 3, 3)
    interrupted(dated, dated.settings())
    said = capsys.readouterr().err
    assert "tailrl: arm test, seed 5: the first prompt is '1 Jan\\n" in said
    assert "warning: arm test, seed 5: the chat template holds the date (strftime_now)" in said
    on_the_day(monkeypatch, "2 Jan")
    interrupted(dated, dated.settings())
    other = (
        "of a run with other prompts (from the same problems: its chat template may hold the date, or the tokenizer "
    )
    assert f"{other}changed); training starts anew\n" in capsys.readouterr().err
    on_the_day(monkeypatch, "1 Jan")
    assert dated.train(dated.settings()).record["resumed_at_steps"] == [2]


def test_the_record_has_the_first_prompt(undisturbed: Result, runs: Runs) -> None:
    problem, tokenizer = json.loads((runs.folder / "problems.jsonl").open().readline()), load_tokenizer(runs.policy)
    tokens = tokenizer.encode(problem["prompt"])
    assert undisturbed.record["first_prompt"] == {"text": problem["prompt"], "tokens": tokens}


# --- one process at a time -----------------------------------------------------------------------------


def test_a_second_process_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And makes the folder again that the end of a study removed."""
    first, second = (Checkpoints(tmp_path / "checkpoints", 1, {}) for _ in range(2))
    order: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "say", said.append)

    def wait() -> None:
        with second.held():
            order.append("second")
            assert (tmp_path / "checkpoints" / "lock").exists()

    thread = threading.Thread(target=wait)
    with first.held():
        thread.start()
        who = f"process {os.getpid()} on {platform.node()}"
        while not any(f"{who} still trains this run; waiting for its end" in line for line in said):
            assert thread.is_alive()
            time.sleep(0.01)
        order.append("first")
        shutil.rmtree(first.folder)
    thread.join()
    assert order == ["first", "second"]


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is without its option flock; without a lock two jobs might write one run."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(checkpoints.fcntl, "flock", refuse)
    folder = tmp_path / "checkpoints"
    with pytest.raises(StudyError) as raised, Checkpoints(folder, 1, {}).held():
        pytest.fail("the folder was taken")
    assert str(raised.value) == (
        f"{folder}: cannot be locked (Function not implemented); results must lie on a file system that has locks"
    )
