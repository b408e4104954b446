"""A copy of the workflow in a folder of its own, and Snakemake in it: a test never touches the project's results."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PARTS = ("Snakefile", "config.yaml", "workflow", "profiles", "envs", "studies")
TINY = "studies/tiny.yaml"
SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "planted0", "HF_TOKEN": "hf_planted1ByTheTestsAndWorthNothing"}
"""What every command finds in its environment, and must leave there."""
# One line for each job of a dry run, with the rule's message. `all` has none.
PLANNED = re.compile(r"^Job \d+: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Workflow:
    """A copy of everything that the workflow runs."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """This environment's, with the folder's own package before any other."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "SNAKEMAKE_"))}
        return (
            kept
            | SECRETS
            | {
                # Goes before the installed package, which is the project's own.
                "PYTHONPATH": str(self.folder / "workflow"),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
                "OMP_NUM_THREADS": "1",
            }
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of this environment, in the folder, on the folder's own package."""
        return subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=1800, check=False
        )

    def plan(self, *arguments: str, study: str = TINY) -> list[str]:
        """The messages of the jobs that would run, sorted; fails where Snakemake refuses."""
        result = self.run("snakemake", "--dry-run", *arguments, "--configfile", study)
        assert result.returncode == 0, result.stdout + result.stderr
        planned = sorted(PLANNED.findall(result.stdout + result.stderr))
        assert planned or "Nothing to be done" in result.stdout + result.stderr
        return planned

    def write_study(self, changes: Mapping[str, Any], base: str = TINY, name: str = "changed.yaml") -> str:
        """A study file with some keys of another one replaced (dotted paths); returns its name."""
        study = yaml.safe_load((self.folder / base).read_text(encoding="utf-8"))
        for path, value in changes.items():
            *parents, leaf = path.split(".")
            block = study
            for parent in parents:
                block = block[parent]
            block[leaf] = value
        (self.folder / name).write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
        return name

    @contextmanager
    def edited(self, file: str, old: str, new: str) -> Iterator[None]:
        """The file with one piece of its text replaced, within the block; afterwards it is as it was, time and all."""
        path = self.folder / file
        before, times = path.read_text(encoding="utf-8"), path.stat()
        assert before.count(old) == 1, f"{file} holds {before.count(old)} times {old!r}"
        path.write_text(before.replace(old, new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def copy_workflow(folder: Path) -> Workflow:
    """The workflow as it stands, without results."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / part)
    return Workflow(folder)
