"""The source files that a module depends on. Rules name them as input: Snakemake does not track imported code."""

import ast
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tailrl.config.base import Settings
from tailrl.config.sampler import SamplerSettings
from tailrl.runtime.import_path import is_import_path, source_of

PACKAGE = Path(__file__).parents[1]


DATA = (".yaml", ".j2", ".css", ".js", ".rst")
"""The endings of a package's files that its modules read."""


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


@cache
def imported_modules(file: Path) -> frozenset[str]:
    """Dotted names of this package's modules that a file imports, inside functions too; of the file as it is first."""
    found: set[str] = set()
    for node in _imports(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            # In `from a import b`, b may be a module or a name in a: try both.
            names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found.update(name for name in names if module_file(name))
    return frozenset(found)


def _imports(statements: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports among statements and the statements in them. `ast.walk` also goes through every expression."""
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            if isinstance(block := getattr(node, inner, None), list):
                yield from _imports(block)


def source_files(*modules: str) -> list[str]:
    """Sorted files of these modules and of the package's modules that they import, directly or not.

    Their data count too: what lies beside them with one of the endings in DATA, and a package's templates/. A file that
    has a module's name, as page.md.j2 has that of page.py, counts with that module. Paths are relative to the working
    directory, so that a finished study can be moved together with its workflow.

    Raises:
        ValueError: one of the dotted names is not a module of this package.
    """
    waiting = {parent for module in modules for parent in _with_packages(module)}
    files: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = module_file(name)
        if file is None:
            raise ValueError(f"{name} is not a module of {PACKAGE.name}")
        files[name] = file
        imported = {parent for module in imported_modules(file) for parent in _with_packages(module)}
        waiting |= imported - files.keys()
    modules_found = set(files.values())
    data = {
        path for file in modules_found if file.name == "__init__.py" for path in _data_of(file.parent, modules_found)
    }
    return sorted(os.path.relpath(file) for file in modules_found | data)


def _data_of(package: Path, modules: Collection[Path]) -> Iterator[Path]:
    """The data of a package, without those of its modules that are not among these."""
    yield from package.glob("templates/*")
    for path in package.glob("*.*"):
        module = package / f"{path.name.partition('.')[0]}.py"
        if path.suffix in DATA and (module in modules or not module.is_file()):
            yield path


JOBS = {
    "problems": ("tailrl.tasks.prepare", "tailrl.tasks.math_verify_worker"),
    "policy": ("tailrl.training.base_policy",),
    "train": ("tailrl.training.loop", "tailrl.tasks.math_verify_worker"),
    "evaluate": ("tailrl.evaluation.evaluate", "tailrl.tasks.math_verify_worker"),
    "measure_gradients": ("tailrl.probes.gradients.quality",),
    "compare": ("tailrl.probes.distributions.measure",),
    "equal_mass_table": ("tailrl.probes.distributions.equal_mass",),
    "summarise": ("tailrl.reports.overview.study",),
    "ablation": ("tailrl.reports.ablation.page",),
    "gradient_page": ("tailrl.reports.gradients.page",),
    "distribution_page": ("tailrl.reports.distributions.page",),
    "pool": ("tailrl.reports.parts.page",),
    "overview": ("tailrl.reports.overview.all_studies",),
}
"""The modules that each kind of job runs, beside those that its settings name."""


SAMPLING = ("train", "evaluate", "compare", "equal_mass_table")
"""The jobs that start an engine."""


def job_files(job: str, settings: Settings | None = None) -> tuple[str, ...]:
    """The source files of a job of a kind of `JOBS`: an edit of one makes its results stale.

    Of tasks, remedies and engines, which are found by their names, those count that the settings name. Of code by its
    import path the named module's own file counts.
    """
    data = settings.model_dump() if settings else {}
    tasks, engines = set(_texts(data, "name")), set(_texts(data, "engine"))
    named = [f"tailrl.config.tasks.{task}" for task in tasks]
    named += [f"tailrl.tasks.{task}" for task in tasks if job == "problems" or task == "lm_eval"]
    named += [f"tailrl.objective.remedies.{weight}" for weight in _texts(data, "sequence")]
    named += ["tailrl.training.verl", "tailrl.integrations.verl.reward"] if "verl" in _texts(data, "backend") else []
    if job in SAMPLING:
        ours = {word: kind.PATH.partition(":")[0] for word, kind in SamplerSettings.kinds().items()}
        named += [ours[engine] for engine in engines & ours.keys()]
    files = _files((*JOBS[job], *sorted(filter(module_file, named))))
    files += tuple(sorted({os.path.relpath(file) for path in own_code(data) if (file := source_of(path))}))
    return (*files, os.path.relpath(PACKAGE.parent / "eval_tasks/boxed.yaml")) if job == "evaluate" else files


def own_code(data: Any) -> list[str]:
    """The import paths in plain settings, under the keys that may have one."""
    keys = ("name", "reward", "estimator", "token", "sequence", "loss", "of", "engine")
    return sorted({text for key in keys for text in _texts(data, key) if is_import_path(text)})


@cache
def _files(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(source_files(*modules))


def _texts(data: Any, key: str) -> Iterator[str]:
    """Every text under this key in plain data, at any depth; `options` are for code of the user's own."""
    for name, value in data.items() if isinstance(data, Mapping) else enumerate(data):
        if name == "options":
            continue
        if name == key and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list | tuple):
            yield from _texts(value, key)


@cache
def at_start(files: tuple[str, ...]) -> dict[str, str]:
    """Digests of source files, by path from the folder `workflow`, when this process first asked for them."""
    return {os.path.relpath(file, PACKAGE.parent): _digest(Path(file)) for file in files}


def edited(digests: Mapping[str, str]) -> list[str]:
    """The source files, by path from the folder `workflow`, that have other digests now."""
    return [file for file, digest in digests.items() if _digest(PACKAGE.parent / file) != digest]


def digest_of_files(files: Iterable[str]) -> str:
    """One digest of source files, as they are now."""
    every = "".join(f"{os.path.relpath(file, PACKAGE.parent)} {_digest(Path(file))}\n" for file in files)
    return hashlib.sha256(every.encode()).hexdigest()[:16]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def _with_packages(module: str) -> list[str]:
    """The module and its packages: importing a.b.c runs a and a.b first."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
