"""Training, verification and evaluation with the transformers engine, in a process where vLLM cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrl.config.load import parse_study
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems
from tailrl.tracking.metrics import METRICS, VERIFICATION

SCRIPT = """
import json, sys
sys.modules["vllm"] = None  # importing it fails as if it were not installed
from pathlib import Path
import numpy as np
from tailrl.runtime.errors import StudyError
from tailrl.evaluation.evaluate import evaluate_arm
from tailrl.rollout import make_sampler
from tailrl.config.jobs import Evaluation, Run
from tailrl.config.sampler import SamplerSettings
from tailrl.training import loop, step

# A random policy solves nothing: without this there would be no gradient.
step.rewards = lambda rollouts, *_: np.arange(len(rollouts), dtype=np.float32) % 2
runs, policy, problems, out = sys.argv[1], *map(Path, sys.argv[2:])
for run in map(Run.model_validate, json.loads(runs)):
    loop.train(run, 0, policy, problems, out / run.arm, out / "wandb")
sampler = SamplerSettings(engine="transformers", dtype="bfloat16")
settings = Evaluation(samples=2, max_new_tokens=8, sampler=sampler)
evaluated = evaluate_arm("a", [(0, out / run.arm / "policy")], problems, settings, out / "parts")
(record,) = evaluated.summary.policies
print(len(record.per_problem), record.response_length_mean)
assert "tailrl.rollout.vllm.engine" not in sys.modules
try:
    make_sampler(SamplerSettings(), policy, 32, 0)
except StudyError as error:
    print(error)
"""
ARMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"sampler": {"engine": "transformers"}, "correction": {"sequence": "mis", "veto": 1e-4}},
    "float32": {"sampler": {"engine": "transformers", "dtype": "float32"}, "disturbance": {"staleness": 1}},
    "verified": {"sampler": {"engine": "transformers", "verify": True}},
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(
    policy_folder: Path, problems: list[Problem], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The folder of two training steps of every arm, and what the process printed."""
    out = tmp_path_factory.mktemp("out")
    write_problems(problems[:10], out / "problems.jsonl")
    training = {"steps": 2, "prompts": 2, "group_size": 4, "max_new_tokens": 8, "learning_rate": 1e-3}
    vocabulary = {"rule": "min_p", "rho": 0.22}
    arms = {name: {"vocabulary": vocabulary, **arm} for name, arm in ARMS.items()}
    study = parse_study({"name": "test", "arms": arms, "training": {**training, "warmup_steps": 0}})
    runs = json.dumps([study.run(arm).model_dump(mode="json") for arm in arms])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, runs, str(policy_folder), str(out / "problems.jsonl"), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "WANDB_MODE": "disabled", "TRANSFORMERS_VERBOSITY": "error"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return out, ended.stdout.splitlines()


def steps_of(out: Path, arm: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / arm / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow  # training with the plain sampler, and `rollout/test_transformers.py`
def test_two_steps_train(trained: tuple[Path, list[str]]) -> None:
    """float32 has the trainer's weights, but for one step of staleness; bfloat16's mismatch is there from the start."""
    fine, coarse = (steps_of(trained[0], arm) for arm in ("float32", "bfloat16"))
    assert [len(fine), len(coarse)] == [2, 2]
    for step in (*fine, *coarse):
        assert step.keys() == METRICS.keys()
        assert step["train/grad_norm"] > 0
        assert step["dvp/kept_vocab_per_token_rollout"] < 600
    assert 0 < fine[0]["rollout_corr_unmasked/delta_abs_max"] < 1e-5
    assert fine[1]["rollout_corr_unmasked/delta_abs_mean"] > 1e-4
    assert coarse[0]["rollout_corr_unmasked/delta_abs_mean"] > 1e-4
    assert coarse[1]["rollout_corr_unmasked/delta_abs_mean"] < 0.1


def test_a_verified_run_has_no_mismatch(trained: tuple[Path, list[str]]) -> None:
    steps = steps_of(trained[0], "verified")
    assert {step["rollout_corr/delta_abs_max"] for step in steps} == {0.0}
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert steps[0].keys() == METRICS.keys() | VERIFICATION.keys()
    tokens = np.load(trained[0] / "verified" / "tokens.npz")
    assert (tokens["logp_train"] == tokens["logp_infer"]).all()


def test_it_evaluates(trained: tuple[Path, list[str]]) -> None:
    count, length = trained[1][-2].split()
    assert int(count) == 10
    assert 1 <= float(length) <= 8


def test_without_vllm_its_engine_is_refused_in_one_sentence(trained: tuple[Path, list[str]]) -> None:
    assert trained[1][-1] == (
        "sampler.engine: vllm is not installed in this environment; engine: transformers samples without it"
    )


def test_a_cache_of_eight_bits_is_refused() -> None:
    sampler = {"engine": "transformers", "kv_cache_dtype": "fp8_e4m3"}
    words = "engine: transformers does not use kv_cache_dtype"
    for settings in ({"arms": {"a": {"sampler": sampler}}}, {"arms": {"a": {}}, "evaluation": {"sampler": sampler}}):
        with pytest.raises(StudyError, match=words):
            parse_study({"name": "test", **settings})


def test_other_engines_refuse_float64() -> None:
    sampler = {"engine": "vllm", "dtype": "float64"}
    with pytest.raises(StudyError, match=r"dtype: must be one of bfloat16, float16, float32 \(given"):
        parse_study({"name": "test", "arms": {"a": {"sampler": sampler}}})


@pytest.mark.parametrize("engine", ["transformers", "exact"])
def test_vllms_own_settings_are_refused_elsewhere(engine: str) -> None:
    sampler = {"engine": engine, "dtype": "float32"}
    for key, value in (("gpu_memory_utilization", 0.5), ("tensor_parallel", 2), ("enforce_eager", False)):
        with pytest.raises(StudyError, match=f"engine: {engine} does not use {key}"):
            parse_study({"name": "test", "arms": {"a": {"sampler": sampler | {key: value}}}})


def test_the_evaluation_cannot_verify() -> None:
    sampler = {"engine": "transformers", "verify": True}
    with pytest.raises(StudyError, match=r"sampler\.verify needs a trainer, which an evaluation does not have"):
        parse_study({"name": "test", "arms": {"a": {}}, "evaluation": {"sampler": sampler}})


def test_an_evaluation_has_an_engine_of_its_own() -> None:
    with pytest.raises(StudyError, match=r"tensor_parallel is for the ranks of a run: an evaluation is one process"):
        parse_study({"name": "test", "arms": {"a": {}}, "evaluation": {"sampler": {"tensor_parallel": 2}}})
