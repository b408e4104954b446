"""Values on a command line: numbers, and folders by seed; and what a command was given, for a sentence at its end."""

from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand

from tailrl.runtime.errors import StudyError


class Noted(TyperCommand):
    """Notes its name and its `--out` in the dictionary that is the context's object."""

    def invoke(self, ctx: Any) -> Any:
        ctx.obj |= {"command": ctx.command_path.removeprefix("tailrl "), "out": ctx.params.get("out")}
        return super().invoke(ctx)


def whole_number(text: str | int, least: int = 0) -> int:
    """The number in plain digits; raises BadParameter for anything else, and for a number below `least`."""
    text = str(text)
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise BadParameter(f"not a whole number from {least} on: {text!r}")
    return int(text)


def positive(text: str | int) -> int:
    """A whole number from 1 on."""
    return whole_number(text, 1)


def seed_and_folder(text: str, option: str = "--policy") -> tuple[int, Path]:
    """The seed and the folder of `SEED=FOLDER`, an option's value; raises StudyError for any other form."""
    seed, separator, folder = text.partition("=")
    if not separator or not (seed.isascii() and seed.isdigit()):
        raise StudyError(f"{option} {text}: write it as SEED=FOLDER")
    return int(seed), Path(folder)
