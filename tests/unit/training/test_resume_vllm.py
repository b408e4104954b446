"""vLLM on a CPU, across processes: a run that is killed and started again has the bits of one that is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from step_fixture import run_of

from tailrl.records import Problem, write_problems

pytestmark = pytest.mark.vllm

SCRIPT = """
import os, signal, sys
from pathlib import Path
from tailrl.settings import Run
from tailrl.study import parse_settings
from tailrl.training import loop

settings, policy, problems, out, kill = sys.argv[1:]
take_step = loop.take_step

def killed(job, state, *others):
    if state.step == int(kill):
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(job, state, *others)

loop.take_step = killed
# Responses of a random policy are never right: half of them are, by their length and tokens.
loop.rewards = lambda rollouts, *_: loop.np.array([sum(r.tokens) % 2 for r in rollouts], dtype=loop.np.float32)
loop.train(parse_settings(Run, settings), 3, Path(policy), Path(problems), Path(out), Path(out))
"""


def test_a_killed_run_with_vllm_ends_as_an_undisturbed_one(
    tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few problems, so that prompts come again, the self-test's among them."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    run = run_of({"vocabulary": {"rule": "min_p", "rho": 0.01}}, steps=5, checkpoint_every=2, learning_rate=1e-2)

    def train(name: str, kill: int) -> int:
        given = [run.model_dump_json(), policy_folder, tmp_path / "problems.jsonl", tmp_path / name, kill]
        command = [sys.executable, "-c", SCRIPT, *map(str, given)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode in (0, -9), ended.stderr
        return ended.returncode

    assert train("undisturbed", -1) == 0
    assert (train("killed", 3), train("killed", -1)) == (-9, 0)
    found = []
    for name in ("undisturbed", "killed"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        plain = [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines]
        found.append((plain, (tmp_path / name / "policy" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]
    assert json.loads((tmp_path / "killed" / "run.json").read_text())["resumed_at_steps"] == [2]
    assert all(line["train/grad_norm"] > 0 for line in found[0][0])
