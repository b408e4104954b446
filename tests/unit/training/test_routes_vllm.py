"""Whole runs of a mixture of experts with vLLM on a CPU, with and without routing replay, each in its own process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moe_fixture import SETTINGS, mixture
from step_fixture import run_of
from transformers import PreTrainedTokenizerFast

from tailrl.model.policy import save_policy
from tailrl.tasks.problem import Problem, write_problems
from tailrl.tracking.metrics import METRICS, ROUTING

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = """
import sys
from pathlib import Path
from tailrl.config.jobs import Run
from tailrl.config.load import parse_settings
from tailrl.training import loop, step

*runs, policy, problems, out = sys.argv[1:]
# Responses of a random policy are never right: half of them are, by their tokens.
step.rewards = lambda rollouts, *_: step.np.array([sum(r.tokens) % 2 for r in rollouts], dtype=step.np.float32)
for number, run in enumerate(runs):
    name = f"{out}/{number}"
    take_step = loop.take_step
    def interrupted(job, state, *others, number=number):
        if number == 1 and state.step == 2 and not state.resumed:
            raise KeyboardInterrupt
        return take_step(job, state, *others)
    loop.take_step = interrupted
    for _ in range(2):
        try:
            loop.train(parse_settings(Run, run), 3, Path(policy), Path(problems), Path(name), Path(out))
        except KeyboardInterrupt:
            continue
        break
    loop.take_step = take_step
"""


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without times."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(line.keys() == METRICS.keys() | ROUTING.keys() for line in read)
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in read]


def test_runs_with_replay(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    # Where it is set, each process would compile vLLM again.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    save_policy(mixture(tokenizer), tokenizer, tmp_path / "policy")
    write_problems(problems[:5], tmp_path / "problems.jsonl")

    def settings(dtype: str, replay: bool) -> str:
        run = run_of({}, checkpoint_every=1, learning_rate=1e-3)
        sampler = run.sampler.model_copy(update={"routes": True, "dtype": dtype})
        training = run.training.model_copy(update={"routing_replay": replay})
        return run.model_copy(update={"sampler": sampler, "training": training, "policy": SETTINGS}).model_dump_json()

    runs = [settings("bfloat16", True), settings("bfloat16", True), settings("bfloat16", False)]
    given = [*runs, tmp_path / "policy", tmp_path / "problems.jsonl", tmp_path]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, given)], capture_output=True, text=True, timeout=1200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    replayed, interrupted, without = (lines(tmp_path / str(number)) for number in range(3))
    assert replayed == interrupted  # to the bit, after an interruption
    assert json.loads((tmp_path / "1" / "run.json").read_text(encoding="utf-8"))["resumed_at_steps"] == [2]
    # The first step samples the same: the trainer flips in both, and replay takes its part out of the mismatch.
    assert replayed[0]["routing/flip_fraction"] > 0
    assert replayed[0]["rollout_corr/k3_kl"] < without[0]["rollout_corr/k3_kl"]
    assert without[0]["routing/flipped_k3_kl"] > without[0]["routing/unflipped_k3_kl"]
    for line in (*replayed, *without):
        assert line["train/grad_norm"] > 0
        assert line["routing/layer_flip_fraction_mean"] <= line["routing/layer_flip_fraction_max"]
        assert line["routing/layer_flip_fraction_max"] <= line["routing/flip_fraction"]
    with np.load(tmp_path / "0" / "tokens.npz") as arrays:
        assert arrays["flips"].shape == arrays["logp_train"].shape
        first = arrays["flips"][arrays["step"] == 0]
    assert (first > 0).mean() == pytest.approx(replayed[0]["routing/flip_fraction"])
