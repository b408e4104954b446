"""What verl loads by its entry point, in every process: it waits for verl's trainers, and imports nothing by itself.

verl loads plugins while it is imported itself, also in samplers and reward workers, and logs one that fails at DEBUG
alone. So this module imports the standard library only, and its trainers are asked for by name: verl ends a run that
names an unknown one.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _register_trainers() -> None:
    from tailrl.integrations.verl import trainer

    trainer.register()


def _register_older_trainer() -> None:
    from tailrl.integrations.verl import older

    older.register()


WAITED_FOR: dict[str, Callable[[], None]] = {
    "verl.trainer.ppo.v1": _register_trainers,
    "verl.trainer.ppo.ray_trainer": _register_older_trainer,
}
"""Modules of verl, with what is done once one has been imported."""


class AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        """The module's own spec, whose loader calls the function at its end; None for any other module."""
        then = WAITED_FOR.pop(name, None)
        spec = find_spec(name) if then else None
        if then is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader's own again, for some finders keep their loaders
            loader.exec_module(module)
            try:
                then()
            except Exception as error:
                # A run that asks for nothing goes on; one that names a trainer of the plugin is ended by verl.
                print(f"tailrl: could not add itself to {name}: {type(error).__name__}: {error}", file=sys.stderr)

        loader.exec_module = exec_module
        return spec


def install() -> None:
    """Wait for verl's trainers; raises RuntimeError where they were imported already."""
    if late := [name for name in WAITED_FOR if name in sys.modules]:
        raise RuntimeError(f"{', '.join(late)} was imported before this plugin")
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


install()
