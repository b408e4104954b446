"""In each documented install every command works, or says in one sentence which extra it needs."""

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tailrl.cli.commands import HELP_GROUPS
from tailrl.runtime.extras import extras

ROOT = Path(__file__).parents[3]
SCRIPT = """
import contextlib, io, json, sys
lacking, alone, commands, names = json.loads(sys.argv[1])

class Filtered:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        there = {*alone, *sys.stdlib_module_names, "tailrl"}
        if top in lacking or (alone and top not in there and not top.startswith("_sysconfigdata")):
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Filtered, sys.meta_path)
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


def ends(lacking: Iterable[str], folder: Path, alone: Iterable[str] = ()) -> dict[str, str | int]:
    """How each command and each import ends where these libraries are not installed; `alone`: these alone are."""
    study, log = str(ROOT / "config.yaml"), folder / "log.jsonl"
    log.write_text('{"sampler_logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.0, -2.1]}\n', encoding="utf-8")
    out = str(folder / "out")
    commands = [
        *(["check", study], ["plan", study], ["schema"], ["metrics"], ["download", study]),
        *(["demo", "--no-open", "--out", str(folder / "demo.html")], ["watch", str(log), "--once"]),
        ["explain", str(log), "--model", str(folder / "nowhere")],
        *(["diagnose", str(log)], ["probe", str(folder / "nowhere")], ["claims", out], ["dashboard", out]),
        *(["card", out, "--evaluation", out], ["job", "summarise", "--study", study, "--results", out, "--out", out]),
    ]
    assert {command[0] for command in commands} - {"job"} == {
        command.__name__ for group in HELP_GROUPS.values() for command in group
    }
    spelled = sorted(name.replace("-", "_") for name in lacking)
    given = json.dumps([spelled, sorted(alone), commands, NAMES])
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


def base() -> set[str]:
    """The top names of all modules of the base's libraries and of what those need."""
    waiting, found = [need for need in metadata.requires("tailrl") or () if "extra ==" not in need], set()
    while waiting:
        need = Requirement(waiting.pop())
        name = canonicalize_name(need.name)
        if name not in found and (need.marker is None or need.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += metadata.requires(name) or ()
    installed = metadata.packages_distributions()
    return {top for top, names in installed.items() if found & {canonicalize_name(name) for name in names}}


def test_the_extras_are_those_of_the_package() -> None:
    assert extras()["diagnose"] == {"torch"} and {"transformers", "trl"} <= extras()["trl"]
    assert {"scipy", "snakemake"} <= extras()["study"] and not {"scipy", "torch", "snakemake"} & base()
    assert next(iter(extras())) == "diagnose", "the smallest first"


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [(), ("fcntl", "resource")], ids=["Linux", "no module of Unix"])
def test_a_plain_install(elsewhere: tuple[str, ...], tmp_path: Path) -> None:
    """With the base's own libraries and no other, each command for logs and plans works."""
    asked = needs(ends(elsewhere, tmp_path, alone=base()))
    works = {"diagnose", "demo", "watch", "plan", "check", "schema", "metrics", "read_study"}
    assert not asked.keys() & works
    assert asked["probe"] == ".[probe]" and asked["batch_loss"] == ".[diagnose]"
    others = asked.keys() - {"probe", "explain", "batch_loss"}
    assert others >= {"claims", "train"} and {asked[name] for name in others} == {".[study]"}


@pytest.mark.slow
def test_a_plain_install_reads_curves_and_names_what_a_file_of_torch_needs(tmp_path: Path) -> None:
    curve, dump = tmp_path / "metrics.jsonl", tmp_path / "dump.pt"
    lines = [{"step": i, "rollout_corr/k3_kl": 1e-3 * (1 + i), "rollout_corr/kl": 1e-3} for i in range(40)]
    curve.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    dump.write_bytes(b"PK")
    script = SCRIPT.replace("ends[command[0]]", "ends[command[-1]]")
    commands = [["diagnose", str(curve)], ["diagnose", str(dump)]]
    given = json.dumps([[], sorted(base()), commands, []])
    ended = subprocess.run([sys.executable, "-c", script, given], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found[str(curve)] == "works"
    needed = f'tailrl: {dump} needs torch, which is not installed: pip install ".[diagnose]" in a checkout of tailrl'
    assert found[str(dump)] == f"{needed}; or save the columns with numpy.savez_compressed"


@pytest.mark.slow
def test_an_install_for_models(tmp_path: Path) -> None:
    """What a probe needs is there, and what a study needs is not."""
    # What transformers imports where it is there needs what is not there.
    found = ends({*extras()["study"] - extras()["probe"], "vllm", "pandas", "sklearn"}, tmp_path)
    assert [found[name] for name in ("diagnose", "batch_loss", "check", "plan", "demo")] == ["works"] * 5
    assert "nowhere" in str(found["probe"])
    asked = needs(found)
    assert asked.keys() >= {"job", "claims"} and {*asked.values()} == {".[study]"}


@pytest.mark.parametrize("module", ["tailrl.nowhere", "no_such_library"])
def test_another_library_is_no_extras(module: str, tmp_path: Path) -> None:
    """A fault of our own keeps its traceback."""
    script = f"from tailrl.cli import commands\ndef schema(): import {module}\n"
    script += "commands.HELP_GROUPS['Study'] = (schema,)\nimport sys\nsys.argv = ['tailrl', 'schema']\n"
    script += "from tailrl.cli import main\nmain()\n"
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "Traceback" in ended.stderr and module in ended.stderr
