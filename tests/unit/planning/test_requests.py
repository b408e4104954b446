"""What jobs ask a cluster for goes with the plan."""

from typing import Any

import pytest

from tailrl.config.load import parse_study
from tailrl.config.study import Study
from tailrl.planning.plan import (
    AT_ONCE_BYTES,
    PROCESS_BYTES,
    Asked,
    comparison_request,
    evaluation_request,
    policy_request,
    training_request,
)
from tailrl.planning.shapes import KNOWN

LARGE = KNOWN["Qwen/Qwen3-14B"].parameters


def study_of(path: str | None = None, **training: Any) -> Study:
    policy = {"policy": {"source": "pretrained", "path": path}} if path else {}
    return parse_study({"name": "s", "arms": {"a": {}}, "training": training} | policy)


def test_a_large_policy_gets_the_memory_that_it_needs() -> None:
    """Ranks share the file of the policy and write a checkpoint in parts; the first of several has one more policy."""
    study = study_of("Qwen/Qwen3-14B-Base")
    run = study.run("a")
    eight, one = (training_request(study, run, ranks).mem_mb for ranks in (8, 1))
    parts = 1e-6 * (2 * AT_ONCE_BYTES + PROCESS_BYTES)
    assert one == pytest.approx(4e-6 * LARGE + parts, abs=1)
    assert eight == pytest.approx(2 * 4e-6 * LARGE + parts + 7e-6 * PROCESS_BYTES, abs=1)
    assert policy_request(study).mem_mb > 4e-6 * LARGE
    two = evaluation_request(study, 10, 2).mem_mb
    assert two == 2 * evaluation_request(study, 10, 1).mem_mb > 2 * 4e-6 * LARGE
    assert comparison_request(study).mem_mb > 4e-6 * LARGE


def test_time_goes_with_the_work_up_to_a_day() -> None:
    def minutes(steps: int) -> int:
        study = study_of("Qwen/Qwen3-1.7B-Base", steps=steps, max_new_tokens=2000, prompts=64, group_size=8)
        return training_request(study, study.run("a"), 1).runtime

    assert minutes(1) == 60
    assert 60 < minutes(50) < minutes(100) < 1440
    assert minutes(100) == pytest.approx(2 * minutes(50), rel=0.02)
    assert minutes(100_000) == 1440


def test_policies_shared_by_processes_take_less_time() -> None:
    study = parse_study(
        {"name": "s", "arms": {"a": {}}, "policy": {"source": "pretrained", "path": "Qwen/Qwen3-14B-Base"}}
        | {"evaluation": {"task": {"name": "aime25"}, "samples": 8, "max_new_tokens": 4000}}
    )
    one, four = (evaluation_request(study, 8, ranks).runtime for ranks in (1, 4))
    assert 60 < four < one <= 1440


def test_unknown_sizes_get_a_day() -> None:
    study = study_of("someone/a-model")
    assert training_request(study, study.run("a"), 1) == evaluation_request(study, 1, 1) == Asked()
