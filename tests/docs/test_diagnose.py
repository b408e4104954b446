"""The tutorial on a verl run, and the page of the schema: their code and commands, as they stand there."""

import ast
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pages_fixture import DOCS, blocks, commands

from tailrl import cli, diagnose
from tailrl.diagnosis.formats import formats
from tailrl.diagnosis.tables import read_table
from tailrl.integrations.verl import log
from tailrl.integrations.verl.settings import Log, Plugin, read_settings

TUTORIAL, SCHEMA, VERL = "tutorials/diagnose-a-log.md", "how-to/log-schema.md", "how-to/verl.md"


def lines_of_verl(page: str) -> dict[str, str]:
    """What a page tells to add to verl's command."""
    blocks_of_verl = [block for block in blocks(page, "text") if "tailrl" in block and "=" in block]
    return dict(line.split("=", 1) for block in blocks_of_verl for line in block.splitlines())


def asked_of_plugin(page: str) -> Plugin:
    """The same as the plugin reads it, which verl's Hydra hands on by path."""
    asked: dict[str, Any] = {}
    for key, value in lines_of_verl(page).items():
        if key.startswith("+tailrl."):
            _, *parts, name = key.split(".")
            place = asked
            for part in parts:
                place = place.setdefault(part, {})
            place[name] = yaml.safe_load(value)
    return read_settings(asked)


@pytest.mark.parametrize("page", [TUTORIAL, VERL])
def test_the_plugin_reads_what_its_pages_tell_to_type(page: str) -> None:
    lines = lines_of_verl(page)
    assert lines["trainer.v1.trainer_mode"] == "tailrl"
    assert lines["actor_rollout_ref.rollout.calculate_log_probs"] == "true"
    settings = asked_of_plugin(page)
    assert settings.log is not None and settings.log.folder == "tokens"
    assert settings.log.responses == 64 and settings.log.every == 1, "the defaults that both pages name"
    assert (settings.dvp is not None) == settings.watch == (page == VERL)


def test_the_page_names_each_key_of_the_log() -> None:
    text = (DOCS / VERL).read_text(encoding="utf-8")
    named = set(re.findall(r"\+tailrl\.log\.(\w+)=", text))
    assert named == set(Log.model_fields)


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a log that the plugin writes; tests/verl executes the plugin in verl itself."""
    monkeypatch.chdir(tmp_path)
    settings = asked_of_plugin(TUTORIAL).log
    assert settings is not None
    rows = [
        {"token_ids": [5 + i, 11, 12], "sampler_logprobs": [-1.0 - i / 9, -0.5 - i],
         "trainer_logprobs": [-1.5, -0.5 - i / 7],
         "advantage": [0.5 - i, 0.5 - i], "mask": [1, 1], "step": 1 + i, "version": 1, "reward": 1.0, "text": "a b"}
        for i in range(3)
    ]  # fmt: skip
    log.write(rows, settings, "1")
    install, _, in_verls, command, comparison = commands(TUTORIAL)
    assert in_verls.startswith('pip install ".[verl]"') and install.startswith("pip install .")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    cli.main()
    assert Path("diagnosis.html").stat().st_size > 1000
    shutil.copytree("tokens", "tokens_before")
    monkeypatch.setattr(sys, "argv", shlex.split(comparison))
    cli.main()
    assert "no detectable difference" in Path("change.html").read_text(encoding="utf-8")
    assert diagnose("tokens").measured.tokens == 6


def test_the_curves_alone_give_the_answer_that_the_tutorial_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A k3 that rises from 0.012 by 2.5 % a step, as verl's file logger writes it."""
    monkeypatch.chdir(tmp_path)
    steps = [
        {"step": at, "data": {"rollout_corr/k3_kl": 0.012 * 1.025**at, "critic/rewards/mean": 0.4}} for at in range(60)
    ]
    Path("metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    _, command, *_ = commands(TUTORIAL)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    cli.main()
    [shown] = [block for block in blocks(TUTORIAL, "text") if block.startswith("**Bad")]
    assert capsys.readouterr().out.startswith(shown.strip())
    assert Path("curves.html").stat().st_size > 1000


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
