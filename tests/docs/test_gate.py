"""The page on the gate: the command lines of its workflow and examples, executed within the limits and beyond."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from log_fixture import write_lines
from pages_fixture import blocks, commands

from tailrl.cli.command_line import run

PAGE = "how-to/gate.md"


def rows(size: float) -> list[dict[str, object]]:
    return [
        {
            "sampler_logprobs": [-1.0 - 0.01 * place + size * (-1) ** (place + number) for place in range(20)],
            "trainer_logprobs": [-1.0 - 0.01 * place for place in range(20)],
        }
        for number in range(200)
    ]


def code_of(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    monkeypatch.setattr("sys.argv", words)
    try:
        run()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def steps() -> list[str]:
    """The commands of the workflow."""
    [text] = blocks(PAGE, "yml")
    workflow = yaml.safe_load(text)
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(("size", "code"), [(0.01, 0), (0.5, 1)])
def test_the_workflow_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: float, code: int) -> None:
    monkeypatch.chdir(tmp_path)
    install, smoke, gate = steps()
    assert install.startswith("pip install ") and smoke.startswith("python ")
    log = shlex.split(smoke)[-1]
    assert log in shlex.split(gate)
    write_lines(tmp_path / log, rows(size))
    assert code_of(monkeypatch, shlex.split(gate)) == code
    assert json.loads((tmp_path / "mismatch.json").read_text(encoding="utf-8"))["exit_code"] == code
    assert (tmp_path / "mismatch.html").stat().st_size > 1000, "the page is there beyond a limit too"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("rollout_log", 0.01), ("before", 0.5), ("after", 0.01)):
        write_lines(tmp_path / f"{name}.jsonl", rows(size))
    (tmp_path / "wandb_export.csv").write_text("Step,run - rollout_corr/k3_kl\n1,1e-3\n2,1e-3\n", encoding="utf-8")
    lines = commands(PAGE)
    executed = [line for line in lines if not line.startswith("tailrl probe")]
    assert len(executed) == 3
    for line in executed:
        assert code_of(monkeypatch, shlex.split(line)) == 0, line
