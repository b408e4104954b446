"""In each documented install every command works, or says in one sentence which extra it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tailrl.cli.commands import HELP_GROUPS
from tailrl.runtime.extras import extras

ROOT = Path(__file__).parents[3]
SCRIPT = """
import contextlib, io, json, sys
lacking, commands, names = json.loads(sys.argv[1])

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
from tailrl.cli import main

ends = {}
for command in commands:
    sys.argv = ["tailrl", *command]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
        ends[command[0]] = "works"
    except SystemExit as ended:
        ends[command[0]] = "works" if ended.code in (0, None) else ended.code
    except BaseException as error:
        ends[command[0]] = f"TRACEBACK {error!r}"
for name in names:
    try:
        exec(f"from tailrl import {name}")
        ends[name] = "works"
    except ImportError as error:
        ends[name] = f"{type(error).__name__}: {error}"
import tailrl
assert [hasattr(tailrl, name) for name in names] == [ends[name] == "works" for name in names]
print(json.dumps(ends))
"""
NAMES = ["read_study", "batch_loss", "diagnose", "train"]


def ends(lacking: set[str], folder: Path) -> dict[str, str | int]:
    """How each command and each import ends where these libraries are not installed."""
    study, log = str(ROOT / "config.yaml"), folder / "log.jsonl"
    log.write_text('{"sampler_logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.0, -2.1]}\n', encoding="utf-8")
    out = str(folder / "out")
    commands = [
        *(["check", study], ["plan", study], ["schema"], ["metrics"], ["download", study], ["unlock"]),
        *(["diagnose", str(log)], ["probe", str(folder / "nowhere")], ["claims", out], ["mirror", out]),
        *(["across", study, study, "--results", out, "--out", out], ["dashboard", out]),
        *(["card", out, "--evaluation", out], ["job", "summarise", "--study", study, "--results", out, "--out", out]),
    ]
    assert {command[0] for command in commands} - {"job"} == {
        command.__name__ for group in HELP_GROUPS.values() for command in group
    }
    given = json.dumps([sorted(name.replace("-", "_") for name in lacking), commands, NAMES])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, given], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str | int] = json.loads(ended.stdout.splitlines()[-1])
    return found


def needs(found: dict[str, str | int]) -> dict[str, str]:
    """The extra that each of them asks for; fails where one ends in any other way than in a sentence or well."""
    asked = {}
    for name, end in found.items():
        assert end == "works" or (isinstance(end, str) and "TRACEBACK" not in end and "\n" not in end), (name, end)
        if "which is not installed" in str(end):
            asked[name] = str(end).split('"')[1]
    return asked


def test_the_extras_are_those_of_the_package() -> None:
    assert "torch" in extras()["diagnose"] and "transformers" in extras()["study"]
    assert next(iter(extras())) == "diagnose", "the smallest first"


def test_a_plain_install(tmp_path: Path) -> None:
    asked = needs(ends({*extras()["diagnose"], *extras()["study"], "vllm", "huggingface_hub"}, tmp_path))
    assert asked["diagnose"] == asked["batch_loss"] == ".[diagnose]"
    assert asked.keys() >= {"plan", "probe", "download", "metrics", "train"}
    assert {name: extra for name, extra in asked.items() if extra != ".[study]"}.keys() == {"diagnose", "batch_loss"}
    assert not asked.keys() & {"check", "schema", "unlock", "read_study"}


def test_an_install_for_logs(tmp_path: Path) -> None:
    found = ends({*extras()["study"], "vllm", "huggingface_hub"}, tmp_path)
    assert [found[name] for name in ("diagnose", "batch_loss", "check", "plan")] == ["works"] * 4
    asked = needs(found)
    assert asked.keys() >= {"probe", "download", "metrics", "train"} and {*asked.values()} == {".[study]"}


@pytest.mark.parametrize("module", ["tailrl.nowhere", "no_such_library"])
def test_another_library_is_no_extras(module: str, tmp_path: Path) -> None:
    """A fault of our own keeps its traceback."""
    script = f"from tailrl.cli import commands\ndef schema(): import {module}\n"
    script += "commands.HELP_GROUPS['Study'] = (schema,)\nimport sys\nsys.argv = ['tailrl', 'schema']\n"
    script += "from tailrl.cli import main\nmain()\n"
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "Traceback" in ended.stderr and module in ended.stderr
