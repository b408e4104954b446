"""Older names of arguments, which the code of others may still say."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def accepts_older_names(**names: str) -> Callable[[Function], Function]:
    """The decorated function takes arguments by their older names too: `older="present"`."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def accepting(*arguments: Any, **named: Any) -> Any:
            older = {names[name]: named.pop(name) for name in names if name in named}
            return function(*arguments, **(named | older))

        return cast(Function, accepting)

    return decorate
