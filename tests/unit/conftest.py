"""Synthetic results: the files that training and evaluation leave, with effects that are known."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts_fixture import policy_of, record_of, write_job, write_scores

from tailrl.config.load import parse_study
from tailrl.config.study import Study

CONFIG: dict[str, Any] = {
    "name": "synthetic",
    "description": "A made-up study for the report's tests",
    "seeds": [0, 1, 2],
    "training": {"steps": 60},
    "evaluation": {"samples": 4},
    "arms": {
        "naive": {},
        "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-5"}},
        "mis": {"correction": {"sequence": "mis", "veto": 1e-4}},
        "dvp_mis": {"vocabulary": {"rule": "min_p", "rho": "e-5"}, "correction": {"sequence": "mis"}},
    },
    "ablations": {"rho": {"base": "dvp", "field": "vocabulary.rho", "values": ["e-3", "e-5", "e-8", "e-13"]}},
}
GAIN = {"base": 0.0, "naive": 0.20, "dvp": 0.24, "mis": 0.18, "dvp_mis": 0.25}
PROBLEMS = 120


def make_metrics(*, pruned: bool, mis: bool, k3: float, steps: int, rng: np.random.Generator) -> list[dict[str, float]]:
    """The metrics of each step, with rising reward and the keys of a real run."""
    lines = []
    for step in range(steps):
        noise = 1 + 0.2 * rng.standard_normal()
        progress = step / max(1, steps - 1)
        kept = 1 - 2e-3 * abs(noise) if pruned else 1.0
        line: dict[str, float] = {
            "train/step": step,
            "train/loss": 0.01 * rng.standard_normal(),
            "train/grad_norm": 0.5 * abs(noise),
            "reward/mean": min(1.0, max(0.0, 0.3 + 0.4 * progress + 0.08 * rng.standard_normal())),
            "response/length_mean": 30 - 8 * progress + rng.standard_normal(),
            "policy/entropy": 1.2 * math.exp(-2 * progress) + 0.05 * abs(noise),
            "rollout_corr/k3_kl": 0.0 if k3 == 0 else k3 * abs(noise) * (0.1 if pruned else 1) * 10**progress,
            "rollout_corr_unmasked/k3_kl": k3 * abs(noise) * 10**progress,
            "rollout_corr_raw/rollout_is_mean": 1 + 0.05 * rng.standard_normal(),
            "rollout_corr_raw/rollout_is_eff_sample_size": min(1.0, 0.9 * abs(noise)),
            "rollout_corr/rollout_rs_seq_masked_fraction": 0.05 * abs(noise) if mis else 0.0,
            "rollout_corr/veto_seq_fraction": 0.02 * abs(noise) if mis else 0.0,
            "dvp/kept_mass_train_mean": kept,
            "dvp/kept_mass_train_min": 1 - 20 * (1 - kept),
            "dvp/kept_mass_rollout_mean": kept,
            "dvp/kept_mass_rollout_min": 1 - 22 * (1 - kept),
            "dvp/kept_vocab_per_token_train": 90 * noise if pruned else 2048.0,
            "dvp/kept_vocab_per_token_rollout": 95 * noise if pruned else 2048.0,
            "dvp/sampled_outside_train_support_fraction": 1e-4 * abs(noise) if pruned else 0.0,
            "throughput/tokens_per_second": math.nan,
        }
        phases = {
            "rollout": 0.45,
            "reward": 0.01,
            "forward": 0.14,
            "backward": 0.28,
            "optimizer": 0.05,
            "weights": 0.03,
        }
        line |= {f"time/{phase}": seconds for phase, seconds in phases.items()} | {"time/step": 1.0}
        lines.append(line)
    return lines


def make_tokens(*, sigma: float, metrics: list[dict[str, float]], rng: np.random.Generator, count: int = 4000) -> Any:
    """Tokens whose |Δ| grows with 1 - p: Δ is normal with standard deviation sigma (1 - p). Each is a response."""
    train = -np.minimum(rng.exponential(1.0, count) * rng.integers(0, 5, count), 15.0)
    delta = sigma * -np.expm1(train) * rng.standard_normal(count)
    arrays = {"logp_train": train, "logp_infer": train - delta, "logp_train_masked": train, "logp_infer_masked": train}
    step = rng.integers(0, max(1, len(metrics) // 10), count) * 10
    floats = {name: values.astype(np.float32) for name, values in arrays.items()}
    floats["advantage"] = np.ones(count, np.float32)
    floats["reward"] = np.array([metrics[at]["reward/mean"] for at in step])
    whole = {"step": step.astype(np.int32), "sequence": np.arange(count), "token": np.zeros(count, np.int32)}
    return whole | {"outside": np.zeros(count, dtype=bool), **floats}


def make_policies(study: Study, arm: str, seeds: Iterable[int], gain: float) -> list[dict[str, Any]]:
    """Every policy on the same problems: a shared difficulty, moved by the arm's gain."""
    difficulty = np.random.default_rng(7).uniform(0.1, 0.7, PROBLEMS)
    policies = []
    for seed in seeds:
        rng = np.random.default_rng([seed, *arm.encode()])
        chance = np.clip(difficulty + gain + 0.01 * rng.standard_normal(), 0, 1)
        correct = (rng.uniform(size=(PROBLEMS, study.evaluation.samples)) < chance[:, None]).astype(int)
        policies.append(policy_of(seed, correct.tolist()))
    return policies


def write_results(study: Study, folder: Path) -> None:
    """A whole results folder for the study: its arms, its ablations and the untrained policy."""
    for number, (arm, settings) in enumerate(study.all_arms().items()):
        for seed in study.arm_seeds()[arm]:
            rng = np.random.default_rng([number, seed])
            pruned, mis = settings.vocabulary.rule == "min_p", settings.correction.sequence == "mis"
            steps = study.run(arm).training.steps
            k3 = 0.0 if arm == "dvp_mis" else 1e-4 * (number + 1)
            metrics = make_metrics(pruned=pruned, mis=mis, k3=k3, steps=steps, rng=rng)
            tokens = make_tokens(sigma=0.05 * (number + 1), metrics=metrics, rng=rng)
            write_job(folder / "train" / arm / f"seed{seed}", record_of(study.run(arm), seed), metrics, tokens)
        write_scores(folder, study, arm, make_policies(study, arm, study.arm_seeds()[arm], GAIN.get(arm, 0.2)))
    for name in ("base", *study.baseline_evaluations()):
        write_scores(folder, study, name, make_policies(study, name, [0], 0.0))


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[..., tuple[Study, Path]]:
    """Makes a study (the default one with the given top-level keys replaced) and its results folder."""

    def make(**changes: Any) -> tuple[Study, Path]:
        study, folder = parse_study({**CONFIG, **changes}), tmp_path / "results"
        write_results(study, folder)
        return study, folder

    return make


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """The default study and its results, shared: read it, do not change it."""
    study, folder = parse_study(CONFIG), tmp_path_factory.mktemp("whole") / "results"
    write_results(study, folder)
    return study, folder
