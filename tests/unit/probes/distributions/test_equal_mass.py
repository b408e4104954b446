"""Thresholds of equal kept mass: against plain loops, and the job from a policy to its table."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from definitions import safe_tokens, softmax

from tailrl.config.distributions import Distributions
from tailrl.config.load import parse_study
from tailrl.probes.distributions import equal_mass
from tailrl.probes.distributions.equal_mass import closest_k, closest_p, kept_mass, write_equal_mass
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems

P, V = 60, 40
LOGITS_PV = torch.tensor(np.random.default_rng(0).normal(0, 3, (P, V)))
PROBS = [softmax(row) for row in LOGITS_PV.tolist()]


def plain_mass(rule: str, threshold: float) -> float:
    every = [(probs, safe_tokens(probs, rule, threshold)) for probs in PROBS]
    return float(np.mean([sum(p for p, safe in zip(probs, own, strict=True) if safe) for probs, own in every]))


@pytest.mark.parametrize(("rule", "threshold"), [("min_p", -2.0), ("top_k", 3.0), ("top_p", 0.9), ("full", 0.0)])
def test_kept_mass_is_that_of_plain_loops(rule: str, threshold: float) -> None:
    assert kept_mass(LOGITS_PV, rule, threshold) == pytest.approx(plain_mass(rule, threshold), rel=1e-12)


@pytest.mark.parametrize("log_rho", [-13.0, -5.0, -2.0, -0.5, 0.0])
def test_no_other_threshold_comes_closer(log_rho: float) -> None:
    mass = kept_mass(LOGITS_PV, "min_p", log_rho)
    k = closest_k(LOGITS_PV, mass)
    assert abs(plain_mass("top_k", k) - mass) == min(
        abs(plain_mass("top_k", other) - mass) for other in range(1, V + 1)
    )
    p = closest_p(LOGITS_PV, mass)
    others = [abs(kept_mass(LOGITS_PV, "top_p", float(other)) - mass) for other in 1 - np.logspace(-9, -0.001, 300)]
    # The grid may hit a step that a p of four digits misses.
    assert abs(plain_mass("top_p", p) - mass) <= min(others) + 1e-4


# --- the job ---------------------------------------------------------------------------------------------


def settings(**block: Any) -> Distributions:
    study = {
        "name": "s",
        "arms": {"naive": {}},
        "policy": {"source": "pretrained", "path": "."},
        "training": {"max_new_tokens": 9, "token_budget": 60},
        "distributions": {"responses": 12, "every": 2, "rho": ["1", 0.2, "e-13"], **block},
    }
    return parse_study(study).trainers_own()


def test_the_table_of_a_policy(policy_folder: Path, problems: list[Problem], tmp_path: Path) -> None:
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    write_equal_mass(settings(), policy_folder, tmp_path / "problems.jsonl", tmp_path / "out" / "table.csv")
    with (tmp_path / "out" / "table.csv").open(encoding="utf-8") as file:
        greedy, some, every = csv.DictReader(file)
    assert (greedy["rho"], greedy["k"]) == ("1", "1")
    assert greedy["k_mass"] == greedy["kept_mass"], "the most probable token alone"
    assert 1 < int(some["k"]) < 600 and float(some["p_mass"]) == pytest.approx(float(some["kept_mass"]), abs=0.01)
    assert (every["kept_mass"], every["k"], every["lost_per_response"]) == ("1.0", "600", "0.0")
    lost = [float(row["lost_per_response"]) / (1 - float(row["kept_mass"])) for row in (greedy, some)]
    assert lost[0] == pytest.approx(lost[1]) and 1 <= lost[0] <= 9, "the mean length"


def test_more_than_fits_the_memory_is_refused(
    policy_folder: Path, problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_mass, "MOST_LOGITS", 12 * 5 * 600 - 1)
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    with pytest.raises(StudyError, match="up to 60 positions of 600 logits each are too many"):
        write_equal_mass(settings(), policy_folder, tmp_path / "problems.jsonl", tmp_path / "table.csv")
