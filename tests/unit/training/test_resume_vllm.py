"""vLLM on a CPU, across processes: a run that is killed and started again has the bits of one that is not."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from step_fixture import run_of

from tailrl.tasks.problem import Problem, write_problems

# The same with the exact engine and a plain sampler: `test_resume.py`. Kills with vLLM: `e2e/test_chaos.py`.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = """
import shutil, sys
from pathlib import Path
from tailrl.config.jobs import Run
from tailrl.config.load import parse_settings
from tailrl.training import loop, step

settings, policy, problems, out, left = sys.argv[1:]
take_step = loop.take_step

def copied(job, state, *others):
    if state.step == 3 and not Path(left).exists():
        shutil.copytree(Path(out) / "checkpoints", left)
    return take_step(job, state, *others)

loop.take_step = copied
# Responses of a random policy are never right: half of them are, by their tokens.
step.rewards = lambda rollouts, *_: step.np.array([sum(r.tokens) % 2 for r in rollouts], dtype=step.np.float32)
loop.train(parse_settings(Run, settings), 3, Path(policy), Path(problems), Path(out), Path(out))
"""


@pytest.fixture
def command(
    tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[str]]:
    """Trains into the folder of this name. Few problems, so that prompts come again, the self-test's among them."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    # Where it is set, each process would compile vLLM again.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    run = run_of({"vocabulary": {"rule": "min_p", "rho": 0.01}}, steps=5, checkpoint_every=2, learning_rate=1e-2)

    def words(name: str) -> list[str]:
        left = tmp_path / "other" / "checkpoints"
        given = [run.model_dump_json(), policy_folder, tmp_path / "problems.jsonl", tmp_path / name, left]
        return [sys.executable, "-c", SCRIPT, *map(str, given)]

    return words


def run_to_its_end(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stderr


def results(folder: Path) -> tuple[list[dict[str, Any]], bytes, list[int]]:
    """Metrics without times, the policy's file, and the steps at which the run went on."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain = [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines]
    assert all(line["train/grad_norm"] > 0 for line in plain)
    record = json.loads((folder / "run.json").read_text())
    return plain, (folder / "policy" / "model.safetensors").read_bytes(), record["resumed_at_steps"]


def test_another_process_goes_on_to_the_same_bits(tmp_path: Path, command: Callable[[str], list[str]]) -> None:
    """From a copy of what a SIGKILL in the fourth step would leave."""
    run_to_its_end(command("one"))
    run_to_its_end(command("other"))
    (*one, resumed), (*other, resumed_other) = results(tmp_path / "one"), results(tmp_path / "other")
    assert one == other
    assert (resumed, resumed_other) == ([], [2])


def steps(metrics: Path) -> int:
    """Lines of a run's metrics; 0 where its next process has just removed the file."""
    try:
        return metrics.read_text().count("\n")
    except FileNotFoundError:
        return 0


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path, command: Callable[[str], list[str]]) -> None:
    """By SIGKILL from outside, in whatever it does then: once in its third step or later, once in its fifth."""
    for lines in (2, 4):
        process = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
        metrics, end = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 600
        while steps(metrics) < lines:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    run_to_its_end(command("killed"))
    run_to_its_end(command("undisturbed"))
    (*killed, resumed), (*undisturbed, _) = results(tmp_path / "killed"), results(tmp_path / "undisturbed")
    assert killed == undisturbed
    assert resumed and set(resumed) <= {2, 4}
