"""A run with the exact engine: no mismatch at all, in any metric, at any step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_fixture import STEPS, run_of

from tailrl.config.load import parse_study
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems
from tailrl.training import loop, step

EXACT = {"engine": "exact", "dtype": "float32"}
ZERO = ("kl", "k3_kl", "delta_abs_mean", "delta_abs_max", "log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq")
DIAL = {"bias": 0.1, "noise": 0.2, "floor": 1e-3, "weights": "bfloat16"}
ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "dvp": {"vocabulary": {"rule": "min_p", "rho": 0.22}},
    "dvp_mis": {"vocabulary": {"rule": "min_p", "rho": 0.22}, "correction": {"sequence": "mis", "veto": 1e-4}},
    "int8": {"sampler": {"quantization": "int8", "kv_cache_dtype": "fp8_e4m3"}},
    "int4": {"vocabulary": {"rule": "min_p", "rho": 0.22}, "sampler": {"quantization": "int4", "group_size": 32}},
    "fp8, old weights": {
        "vocabulary": {"rule": "min_p", "rho": 0.22},
        "sampler": {"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"},
        "disturbance": {"staleness": 1, "side": "both"},
    },
    "matched": {"vocabulary": {"rule": "min_p", "rho": 0.22}, "disturbance": {**DIAL, "side": "both"}},
}


def run_steps(
    arm: dict[str, Any], policy_folder: Path, problems: list[Problem], out: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, float]]:
    """The metrics of each step."""
    # A random policy solves nothing: without this there would be no gradient, and the weights would stay.
    monkeypatch.setattr(step, "rewards", lambda rollouts, *_: np.arange(len(rollouts), dtype=np.float32) % 2)
    write_problems(problems, out / "problems.jsonl")
    run = run_of({**arm, "sampler": EXACT | arm.get("sampler", {})}, token_budget=90)
    loop.train(run, 0, policy_folder, out / "problems.jsonl", out / "out", out / "wandb")
    lines = (out / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == STEPS
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("arm", ARMS)
def test_sampler_and_trainer_do_not_differ(
    arm: str, policy_folder: Path, problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in run_steps(ARMS[arm], policy_folder, problems, tmp_path, monkeypatch):
        for group in ("rollout_corr", "rollout_corr_unmasked"):
            assert {name: line[f"{group}/{name}"] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        for of in ("mean", "min"):
            assert line[f"dvp/kept_mass_train_{of}"] == line[f"dvp/kept_mass_rollout_{of}"]
        assert line["dvp/sampled_outside_train_support_count"] == 0
        assert line["train/grad_norm"] > 0
    tokens = np.load(tmp_path / "out" / "tokens.npz")
    assert (tokens["logp_train"] == tokens["logp_infer"]).all()
    assert (tokens["logp_train_masked"] == tokens["logp_infer_masked"]).all()
    if "vocabulary" in ARMS[arm]:
        assert (tokens["logp_train_masked"] > tokens["logp_train"]).any()


def test_a_disturbed_sampler_shows_as_mismatch(
    policy_folder: Path, problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = run_steps({"disturbance": {"noise": 0.2}}, policy_folder, problems, tmp_path, monkeypatch)
    assert all(step["rollout_corr/k3_kl"] > 1e-3 for step in steps)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_another_number_format_is_refused(dtype: str | None) -> None:
    sampler = {"engine": "exact"} | ({"dtype": dtype} if dtype else {})
    with pytest.raises(StudyError, match="engine: exact computes as the trainer does, in float32: say dtype: float32"):
        parse_study({"name": "test", "arms": {"naive": {"sampler": sampler}}})
