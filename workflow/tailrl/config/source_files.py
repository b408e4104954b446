"""The source files that a module depends on. Rules name them as input: Snakemake does not track imported code."""

import ast
import os
from collections.abc import Collection
from functools import cache
from pathlib import Path

from tailrl.config.sampler import ENGINES

PACKAGE = Path(__file__).parents[1]


def module_file(name: str) -> Path | None:
    """The file of a module of this package by its dotted name; None for any other name."""
    parts = name.split(".")
    if parts[0] != PACKAGE.name:
        return None
    path = PACKAGE.joinpath(*parts[1:])
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


def imported_modules(file: Path) -> set[str]:
    """Dotted names of this package's modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # In `from a import b`, b may be a module or a name in a: try both.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found.update(name for name in names if module_file(name))
    return found


def source_files(*modules: str, without: Collection[str] = ()) -> list[str]:
    """Sorted files of these modules and of the package's modules that they import, directly or not.

    A package's data count with it: YAML beside its `__init__.py`, and templates/. Paths are relative to the working
    directory, so that a finished study can be moved together with its workflow.

    Args:
        modules: dotted names.
        without: modules or packages whose import never runs; their own imports are not followed.

    Raises:
        ValueError: one of them is not a module of this package.
    """
    excluded = tuple(f"{name}." for name in without)
    waiting = {parent for module in modules for parent in _with_packages(module)}
    files: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = module_file(name)
        if file is None:
            raise ValueError(f"{name} is not a module of {PACKAGE.name}")
        files[name] = file
        if file.name == "__init__.py":
            files |= {str(data): data for data in (*file.parent.glob("*.yaml"), *file.parent.glob("templates/*"))}
        imported = {parent for module in imported_modules(file) for parent in _with_packages(module)}
        waiting |= {name for name in imported - files.keys() if not f"{name}.".startswith(excluded)}
    return sorted(os.path.relpath(file) for file in files.values())


@cache
def sampling_files(engine: str, *modules: str) -> list[str]:
    """`source_files` of a job that samples with one engine: without the other engines' code."""
    return source_files(*modules, without=[f"tailrl.rollout.{other}" for other in ENGINES if other != engine])


def training_files(engine: str) -> list[str]:
    """The files of a training run: an edit of one makes the run's results and checkpoints stale."""
    return sampling_files(engine, "tailrl.training.loop", "tailrl.tasks.math_verify_worker")


def _with_packages(module: str) -> list[str]:
    """The module and its packages: importing a.b.c runs a and a.b first."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
