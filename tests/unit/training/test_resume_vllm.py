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
import shutil, sys
from pathlib import Path
from tailrl.settings import Run
from tailrl.study import parse_settings
from tailrl.training import loop

settings, policy, problems, out, left = sys.argv[1:]
take_step = loop.take_step

def copied(job, state, *others):
    if state.step == 3 and not Path(left).exists():
        shutil.copytree(Path(out) / "checkpoints", left)
    return take_step(job, state, *others)

loop.take_step = copied
# Responses of a random policy are never right: half of them are, by their tokens.
loop.rewards = lambda rollouts, *_: loop.np.array([sum(r.tokens) % 2 for r in rollouts], dtype=loop.np.float32)
loop.train(parse_settings(Run, settings), 3, Path(policy), Path(problems), Path(out), Path(out))
"""


def test_another_process_goes_on_to_the_same_bits(
    tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a copy of what a SIGKILL in the fourth step would leave. Few problems, so that prompts come again, the
    self-test's among them."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    # Where it is set, each process would compile vLLM again.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    run = run_of({"vocabulary": {"rule": "min_p", "rho": 0.01}}, steps=5, checkpoint_every=2, learning_rate=1e-2)
    left, found = tmp_path / "other" / "checkpoints", []
    for name in ("one", "other"):
        given = [run.model_dump_json(), policy_folder, tmp_path / "problems.jsonl", tmp_path / name, left]
        command = [sys.executable, "-c", SCRIPT, *map(str, given)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        assert ended.returncode == 0, ended.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        plain = [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines]
        found.append((plain, (tmp_path / name / "policy" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "other")]
    assert [record["resumed_at_steps"] for record in records] == [[], [2]]
    assert all(line["train/grad_norm"] > 0 for line in found[0][0])
