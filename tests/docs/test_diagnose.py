"""The tutorial on a verl run, and the page of the schema: their code and commands, as they stand there."""

import ast
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pages_fixture import DOCS, blocks, commands

from tailrl import cli, diagnose
from tailrl.diagnosis.formats import formats
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log

TUTORIAL, SCHEMA = "tutorials/diagnose-a-log.md", "how-to/log-schema.md"


def data_proto() -> SimpleNamespace:
    """What verl's trainer has when it logs a step: two responses, padded to three tokens."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {
        "responses": torch.tensor([[11, 12, 13], [14, 0, 0]]),
        "response_mask": mask,
        "rollout_log_probs": torch.tensor([[-1.0, -0.5, -0.25], [-2.0, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.5, -0.5, -0.25], [-1.0, -7.0, -7.0]]),
        "advantages": torch.tensor([[0.5, 0.5, 0.5], [-0.5, 0.0, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    }
    return SimpleNamespace(batch=batch)


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tutorial's hook, run for two steps in a folder; what verl's own method was called with."""
    called: list[Any] = []

    class RayPPOTrainer:
        config = SimpleNamespace(trainer=SimpleNamespace(rollout_data_dir="rollouts"))
        global_steps = 0

        def _log_rollout_data(self, batch: Any, infos: dict[str, Any], timing: dict[str, Any], folder: str) -> str:
            called.append((batch, infos, timing, folder))
            return "done"

    module = ModuleType("verl.trainer.ppo.ray_trainer")
    module.RayPPOTrainer = RayPPOTrainer  # type: ignore[attr-defined]
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    [hook] = blocks(TUTORIAL, "python")
    exec(compile(hook, TUTORIAL, "exec"), {})
    trainer = RayPPOTrainer()
    for step in (1, 2):
        trainer.global_steps = step
        assert trainer._log_rollout_data(data_proto(), {}, {}, "rollouts") == "done"
    return called


def test_the_hook_is_short() -> None:
    [hook] = blocks(TUTORIAL, "python")
    assert len([line for line in hook.splitlines() if line.strip()]) <= 30 and ast.parse(hook)


def test_the_hook_writes_the_plain_schema(logged: list[Any]) -> None:
    assert [call[1:] for call in logged] == [({}, {}, "rollouts")] * 2
    parts = list(read_log([Path("rollouts/tokens")]))
    assert len(parts) == 2 and {title for title, _ in parts} == {"the documented JSONL or Parquet"}
    log: Log = parts[0][1]
    assert log.token_T.tolist() == [11, 12, 13, 14]
    np.testing.assert_array_equal(log.sampler_T, [-1.0, -0.5, -0.25, -2.0])
    np.testing.assert_array_equal(log.trainer_T, [-1.5, -0.5, -0.25, -1.0])
    assert log.advantage_T.tolist() == [0.5, 0.5, 0.5, -0.5] and log.reward_S.tolist() == [1.0, 0.0]
    assert [part.step_S.tolist() for _, part in parts] == [[1, 1], [2, 2]]


@pytest.mark.usefixtures("logged")
def test_the_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    install, command = commands(TUTORIAL)
    assert install.startswith('pip install ".[diagnose]"')
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    cli.main()
    assert Path("diagnosis.html").stat().st_size > 1000
    assert diagnose("rollouts/tokens").measured.tokens == 8


def test_the_schema_names_every_column() -> None:
    text = (DOCS / SCHEMA).read_text(encoding="utf-8")
    [table] = re.findall(r"^\| column \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    listed = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(listed) == sorted(formats()["plain"].columns.values())
    [code] = blocks(SCHEMA, "python")
    assert "from tailrl.trl import with_log" in code and ast.parse(code)
