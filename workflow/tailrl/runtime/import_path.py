"""Code of a user's own by its import path, `package.module:function`.

A module is looked for in the working directory, where Snakemake runs its jobs, and on Python's path (PYTHONPATH).
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrl.runtime.errors import ConfigurationError, StudyError, one_line, reason

FORM = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""What an import path looks like."""


def is_import_path(name: object) -> bool:
    """Whether a setting's word is an import path."""
    return isinstance(name, str) and re.match(FORM, name) is not None


def source_of(path: str) -> Path | None:
    """The file of an import path's module, which is not imported; None where there is none."""
    parts = path.partition(":")[0].split(".")
    for folder in _places():
        for file in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__init__.py")):
            if file.is_file():
                return file
    return None


def imported(path: str) -> Callable[..., Any]:
    """The function that an import path names.

    Raises:
        StudyError: the module cannot be imported, or has no such function.
    """
    function = named(path)
    if not callable(function):
        module_name, _, name = path.partition(":")
        raise ConfigurationError(f"{path}: {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]


def named(path: str) -> Any:
    """What an import path names; None where its module has no such name.

    Raises:
        StudyError: the module cannot be imported.
    """
    module_name, _, name = path.partition(":")
    before = list(sys.path)
    sys.path[:] = _places()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(f"{path}: {module_name} cannot be imported: {reason(error)}") from error
    finally:
        sys.path[:] = before
    return getattr(module, name, None)


def called(path: str, *arguments: Any, **named: Any) -> Any:
    """What the function of an import path gives; its errors become a StudyError that names it."""
    function = imported(path)
    try:
        return function(*arguments, **named)
    except StudyError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{path}: {type(error).__name__}: {one_line(error)}") from error


def _places() -> list[str]:
    """The folders that are searched: the working directory first."""
    return [str(Path.cwd()), *(place for place in sys.path if place)]
