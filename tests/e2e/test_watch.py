"""`tailrl watch` beside a real training whose log grows: a planted fault is told at its step or the next."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watch_runs import Case, train

from tailrl.tasks.problem import Problem, write_problems

SMALL = {"prompts": 4, "group_size": 4, "max_new_tokens": 16, "learning_rate": 1e-3}
ENGINE = {"sampler": {"engine": "transformers", "dtype": "bfloat16"}}
AT, STEPS = 8, 11


def watched(case: Case, folder: Path, policy: Path, problems: list[Problem]) -> list[dict[str, Any]]:
    """What the command says of each step, while the run trains."""
    base = folder / "base"
    base.mkdir()
    shutil.copytree(policy, base / "policy")
    write_problems(problems, base / "problems.jsonl")
    (folder / case.name).mkdir()
    target = folder / case.name
    if case.fault == "copied":  # the finished run's own file has the true columns
        target = target / "watched-tokens.jsonl"
        target.touch()
    words = ["watch", str(target), "--json", "--every", "0.1", "--without", "lost_seed"]
    command = [str(Path(sys.executable).with_name("tailrl")), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        train(case, folder)
        assert following.stdout is not None
        # Its first line, since before it Ctrl-C may find a command that still starts.
        first = following.stdout.readline()
        following.send_signal(signal.SIGINT)
        lines = [first, *following.stdout.read().splitlines()]
    assert following.returncode == (1 if case.fault else 0)
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "dose", "names"),
    [
        ("", 0.0, set()),
        ("frozen", 0.0, {"weights_stop"}),
        ("ahead", 2.0, {"negative_lag"}),
        ("temperature", 0.6, {"floor_jump", "floor_tail", "confident_disagreement", "ess_collapse"}),
        ("copied", 0.0, {"copied_columns"}),
        ("stuck_batch", 0.0, {"stuck_batch"}),
        ("rate", 50.0, {"learning_rate"}),
    ],
)
def test_a_fault_is_told_within_one_step(
    fault: str, dose: float, names: set[str], policy_folder: Path, problems: list[Problem], tmp_path: Path
) -> None:
    case = Case(name=f"run_{fault}", arm=ENGINE, steps=STEPS, seed=4, training=SMALL, fault=fault, at=AT, dose=dose)
    steps = watched(case, tmp_path, policy_folder, problems)
    assert [step["step"] for step in steps] == list(range(STEPS))
    raised = {step["step"]: {alarm["name"] for alarm in step["alarms"]} for step in steps}
    assert not any(raised[number] for number in range(AT))
    if fault:
        assert names & (raised[AT] | raised[AT + 1]), raised
    else:
        assert not any(raised.values()), raised
