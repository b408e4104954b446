"""The tutorial on a verl run, and the page of the schema: their code and commands, as they stand there."""

import ast
import json
import re
import shlex
import shutil
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
from tailrl.diagnosis.tables import read_table

TUTORIAL, SCHEMA = "tutorials/diagnose-a-log.md", "how-to/log-schema.md"


def columns(layout: str) -> dict[str, torch.Tensor]:
    """What verl has when it logs a step: jagged in its queue, padded in its older trainer."""
    rows: dict[str, list[list[float]]] = {
        "responses": [[11, 12, 13], [14], [15]],
        "response_mask": [[1, 0, 1], [1], [1]],
        "rollout_log_probs": [[-1.0, -0.5, -0.25], [-2.0], [-3.0]],
        "old_log_probs": [[-1.5, -0.5, -0.25], [-1.0], [-3.0]],
        "advantages": [[0.5, 0.5, 0.5], [-0.5], [0.0]],
        "rm_scores" if layout == "jagged" else "token_level_scores": [[0.0, 0.0, 1.0], [0.0], [0.0]],
    }
    tensors = {name: [torch.tensor(row) for row in values] for name, values in rows.items()}
    if layout == "jagged":
        return {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in tensors.items()}
    return {name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in tensors.items()}


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The tutorial's code beside empty trainers. tests/verl executes it with verl's own classes and queue."""
    names = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1", "verl.trainer.ppo.ray_trainer")
    modules = {name: ModuleType(name) for name in (*names, "transfer_queue")}
    nothing = {"fit": None, "_log_rollout_data": None}
    modules["verl.trainer.ppo.v1"].PPOTrainer = type("PPOTrainer", (), nothing)  # type: ignore[attr-defined]
    modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer = type("RayPPOTrainer", (), nothing)  # type: ignore[attr-defined]
    modules["transfer_queue"].kv_batch_get = lambda **_: columns("jagged")  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    [code] = blocks(TUTORIAL, "python")
    names_of_hook: dict[str, Any] = {}
    exec(compile(code, TUTORIAL, "exec"), names_of_hook)
    return SimpleNamespace(**names_of_hook)


def trainer(step: int) -> Any:
    settings = SimpleNamespace(trainer=SimpleNamespace(rollout_data_dir="rollouts"))
    return SimpleNamespace(config=settings, global_steps=step)


@pytest.fixture
def logged(hook: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook's log of two steps in a folder, one of the queue and one of the older trainer."""
    monkeypatch.chdir(tmp_path)
    tags = [{}, {"is_padding": False}, {"is_padding": True}]
    hook.write(trainer(1), SimpleNamespace(keys=["a", "b", "c"], partition_id="train", tags=tags))
    hook.write(trainer(2), SimpleNamespace(batch=columns("padded")))


@pytest.mark.usefixtures("logged")
def test_the_hook_writes_the_plain_schema() -> None:
    parts = list(read_log([Path("rollouts/tokens")]))
    assert len(parts) == 2 and {title for title, _ in parts} == {"the documented JSONL or Parquet"}
    log: Log = parts[0][1]
    assert log.token_T.tolist() == [11, 13, 14]
    np.testing.assert_array_equal(log.sampler_T, [-1.0, -0.25, -2.0])
    np.testing.assert_array_equal(log.trainer_T, [-1.5, -0.25, -1.0])
    assert log.advantage_T.tolist() == [0.5, 0.5, -0.5] and log.reward_S.tolist() == [1.0, 0.0]
    assert [part.step_S.tolist() for _, part in parts] == [[1, 1], [2, 2, 2]]


@pytest.mark.parametrize("lacking", ["rollout_log_probs", "old_log_probs", "response_mask", "token_level_scores"])
def test_a_batch_that_lacks_a_column_is_one_sentence(hook: SimpleNamespace, lacking: str) -> None:
    batch = {name: values for name, values in columns("padded").items() if name != lacking}
    with pytest.raises(RuntimeError, match=f"^log_tokens: verl's batch has no {lacking}$"):
        hook.write(trainer(1), SimpleNamespace(batch=batch))


def test_a_trainer_without_the_methods_is_not_passed_over(hook: SimpleNamespace) -> None:
    with pytest.raises(AttributeError, match="fit"):
        hook.attach(type("Trainer", (), {}))
    with pytest.raises(AttributeError, match="_log_rollout_data"):
        hook.attach(type("Trainer", (), {"fit": None}))


@pytest.mark.usefixtures("logged")
def test_the_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    install, command, comparison = commands(TUTORIAL)
    assert install == "pip install ."
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    cli.main()
    assert Path("diagnosis.html").stat().st_size > 1000
    shutil.copytree("rollouts/tokens", "rollouts/tokens_before")
    monkeypatch.setattr(sys, "argv", shlex.split(comparison))
    cli.main()
    assert "no detectable difference" in Path("change.html").read_text(encoding="utf-8")
    assert diagnose("rollouts/tokens").measured.tokens == 7


def test_the_schema_names_every_column() -> None:
    text = (DOCS / SCHEMA).read_text(encoding="utf-8")
    [table] = re.findall(r"^\| column \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    listed = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(listed) == sorted(formats()["plain"].columns.values())
    [example] = blocks(SCHEMA, "json")
    [(_, log)] = read_table([json.loads(example)] * 2)
    assert log.token_T.tolist() == [19, 2] * 2 and log.sampler_T.tolist() == [-0.11, -0.02] * 2
    assert log.labels_S[0] == {"data_source": "sums", "framework": "verl"} and np.isfinite(log.prompt_S).all()
    [code] = blocks(SCHEMA, "python")
    assert "from tailrl.trl import with_log" in code and ast.parse(code)
