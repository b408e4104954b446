"""The package alone in a new environment, by pip, with each Python that is at hand: its size, the demo, no torch."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 400e6
PINNED, OTHERS = "3.11", ("3.12", "3.13", "3.14")
PYTHONS = [
    pytest.param(PINNED, marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS),
]


def interpreter(version: str) -> Path | None:
    """A Python of this version that runs, on the path or of pyenv; None: there is none."""
    on_the_path = [Path(path) for path in [shutil.which(f"python{version}")] if path]
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in (*on_the_path, *of_pyenv):
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build reads, in a folder where it may leave its own files."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "workflow" / "tailrl", folder / "workflow" / "tailrl", ignore=ignored)
    return folder


@pytest.mark.parametrize("version", PYTHONS)
def test_a_new_environment(version: str, sources: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True, env=environment)
    here = tmp_path / "venv" / "bin"
    before = set((tmp_path / "venv").rglob("*"))
    installed = subprocess.run(
        [here / "pip", "install", "-q", "--disable-pip-version-check", sources],
        capture_output=True, text=True, check=False, env=environment, timeout=900,
    )  # fmt: skip
    if "No matching distribution" in installed.stderr:
        pytest.skip("no package index that pip is configured with can be reached")
    assert installed.returncode == 0, installed.stderr
    added = [path for path in (tmp_path / "venv").rglob("*") if path not in before and path.is_file()]
    assert sum(path.stat().st_size for path in added) < MOST_BYTES

    def tailrl(*words: str) -> subprocess.CompletedProcess[str]:
        command = [here / "tailrl", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)

    shown = tailrl("demo", "--no-open")
    assert shown.returncode == 0 and "top-p" in shown.stdout, shown.stderr
    assert (tmp_path / "tailrl-demo.html").stat().st_size > 50_000
    assert tailrl("check", str(ROOT / "config.yaml")).returncode == 0
    assert "Results" in tailrl("--help").stdout and tailrl("--version").stdout.startswith("tailrl ")
    without = subprocess.run([here / "python", "-c", "import torch"], capture_output=True, check=False, env=environment)
    assert without.returncode == 1
