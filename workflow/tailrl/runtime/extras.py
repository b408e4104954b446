"""The sentence where a library is not installed: which of this package's extras has it."""

import importlib.metadata
import re
from functools import cache

PACKAGE = "tailrl"
UNIX_ALONE = ("fcntl", "resource")  # modules of Python that Windows lacks


@cache
def extras() -> dict[str, frozenset[str]]:
    """The libraries of each extra, by the names under which they are installed; the smallest extra first."""
    found: dict[str, set[str]] = {}
    for need in importlib.metadata.requires(PACKAGE) or ():
        extra = re.search(r"extra == [\"'](\w+)[\"']", need)
        library = re.match(r"[\w.-]+", need)
        if extra and library and library[0] != PACKAGE:
            found.setdefault(extra[1], set()).add(library[0])
    return {name: frozenset(found[name]) for name in sorted(found, key=lambda name: len(found[name]))}


def not_installed(error: BaseException, what: str, extra: str | None = None) -> str | None:
    """The sentence for an import that failed because a library of an extra is missing; None for any other error.

    Args:
        error: what the import raised.
        what: the command, the file or the public name that needs it.
        extra: the extra that it needs as a whole; None: the smallest one that has the library.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    module = error.name.partition(".")[0]
    if module in UNIX_ALONE:
        return f"{what} runs on Linux alone"
    holding = [name for name, libraries in extras().items() if module.replace("_", "-") in libraries]
    if not holding:
        return None
    command = f'pip install ".[{extra or holding[0]}]"'
    return f"{what} needs {module}, which is not installed: {command} in a checkout of {PACKAGE}"
