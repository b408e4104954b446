"""Which source files a module depends on: Snakemake does not track imported code, so rules name it as input."""

import ast
import os
from collections.abc import Collection
from functools import cache
from pathlib import Path

from tailrl.config.sampler import ENGINES

PACKAGE = Path(__file__).parents[1]


def module_file(name: str) -> Path | None:
    """The file of a module of this package by its dotted name, or None where the name is no module of it."""
    parts = name.split(".")
    if parts[0] != PACKAGE.name:
        return None
    path = PACKAGE.joinpath(*parts[1:])
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


def imported_modules(file: Path) -> set[str]:
    """Dotted names of the modules of this package that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from a import b` may import the module a.b or a name of a: ask for both.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found.update(name for name in names if module_file(name))
    return found


def source_files(*modules: str, without: Collection[str] = ()) -> list[str]:
    """Files of these modules and of everything in the package that they import, directly or not, sorted.

    YAML beside a package's `__init__.py` and its folder templates/ are its data, and count with it.

    Relative to the working directory, so that a finished study may be moved together with its workflow.

    Args:
        modules: dotted names.
        without: modules or packages named in an import that never runs: neither they nor what they alone import.

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
    """`source_files` of a job that samples: it loads one engine, and the code of the others is not its own."""
    return source_files(*modules, without=[f"tailrl.rollout.{other}" for other in ENGINES if other != engine])


def training_files(engine: str) -> list[str]:
    """What a training run depends on: an edit of it makes the run's results stale, and its checkpoints."""
    return sampling_files(engine, "tailrl.training.loop", "tailrl.tasks.math_verify_worker")


def _with_packages(module: str) -> list[str]:
    """The module and the packages around it: importing a.b.c runs a and a.b first."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
