"""Shared by the tests: a policy small enough to build in a second, and an engine that samples from it plainly."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Read when torch is imported. Matrices this small gain nothing from threads, and on a busy machine the threads
# wait for each other: a test of one second took fifty.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests that want W&B say so.
os.environ["WANDB_MODE"] = "disabled"

import hypothesis
import pytest
from sampler_fixture import PlainSampler

from tailrl.config.policy import ScratchPolicy
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task

# torch and transformers take seconds to import: only the tests that use a policy pay for them.
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CASES_IN_CI = 2
TINY = ScratchPolicy(vocabulary_size=600, hidden_size=64, layers=2, heads=2, intermediate_size=96, max_length=64)


WHOLE = ("e2e", "workflow")  # the folders of tests with Snakemake

# A time limit on an example fails on a busy machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def freeze() -> None:
    """What is there stays: a collector that goes through all tests and libraries takes most of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """While the modules of all tests are imported, a quarter of the time went into looking for garbage."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test of many cases runs two of them in CI; `make test-long` runs the others.

    A test that runs a study or plans one with Snakemake is slow, whatever it says.
    """
    cases: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > CASES_IN_CI:
                item.add_marker("long")
        if item.path.parent.name in WHOLE:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Before the first test."""
    freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file with vLLM, whose end thaws everything and takes the engine's process group away."""
    if item.get_closest_marker("vllm") and (nextitem is None or nextitem.path != item.path):
        from torch import distributed

        freeze()
        assert not distributed.is_initialized(), "an engine of this file was not shut down: later tests with ranks fail"


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of all says what did not run, and why."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        reporter.write_line(f"did not run: {'; '.join(f'{count}: {why}' for why, count in reasons.items())}")


@pytest.fixture(scope="session", autouse=True)
def _powered() -> Iterator[None]:
    """No test cuts the power, which is all that forcing a file onto the disk guards against: 20 ms a step, saved."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def problems() -> list[Problem]:
    return load_task(ArithmeticTask(problems=60, seed=5)).problems


@pytest.fixture(scope="session")
def tokenizer(problems: list[Problem]) -> "PreTrainedTokenizerFast":
    from tailrl.model.tokenizer import train_tokenizer

    return train_tokenizer(TINY.vocabulary_size, [problem.prompt + problem.solution for problem in problems])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """PyTorch computes with so many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def model(tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
    """A tiny random Llama, new for every test."""
    from tailrl.model.policy import create_policy

    return create_policy(TINY, tokenizer, seed=3)


@pytest.fixture(scope="session")
def policy_folder(tokenizer: "PreTrainedTokenizerFast", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy as a folder, shared: read it, do not change it."""
    from tailrl.model.policy import create_policy, save_policy

    folder = tmp_path_factory.mktemp("policy")
    save_policy(create_policy(TINY, tokenizer, seed=3), tokenizer, folder)
    return folder


@pytest.fixture
def plain_samplers(monkeypatch: pytest.MonkeyPatch) -> list[PlainSampler]:
    """Has the training loop use a `PlainSampler`; the list holds those that were made."""
    made: list[PlainSampler] = []

    def make(settings: object, policy_folder: Path, *_: object) -> PlainSampler:  # noqa: ARG001
        made.append(PlainSampler(policy_folder))
        return made[-1]

    monkeypatch.setattr("tailrl.training.loop.make_sampler", make)
    return made
