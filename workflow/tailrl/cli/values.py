"""Values on a command line: numbers, and folders by seed; and what a command was given, for a sentence at its end."""

from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand

from tailrl.config.base import LARGEST_SEED, MOST_TOKENS, MOST_UNITS
from tailrl.runtime.errors import ConfigurationError


class Noted(TyperCommand):
    """Notes in the dictionary that is the context's object its name, its `--out`, and whether it is a gate."""

    def invoke(self, ctx: Any) -> Any:
        is_gate = bool(ctx.params.get("largest") or ctx.params.get("least"))
        command = ctx.command_path.removeprefix("tailrl ")
        ctx.obj |= {"command": command, "out": ctx.params.get("out"), "gate": is_gate}
        return super().invoke(ctx)


def whole_number(text: str | int, least: int = 0, most: int = LARGEST_SEED) -> int:
    """The number in plain digits; raises BadParameter for anything else, and for a number out of its range."""
    text = str(text)
    # Python reads no number of more than 4,300 digits.
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        shown = text if len(text) < 40 else f"{text[:40]}..."
        raise BadParameter(f"not a whole number from {least} to {most}: {shown!r}")
    return int(text)


def units(text: str | int) -> int:
    """A number of processes or devices."""
    return whole_number(text, 1, MOST_UNITS)


def tokens(text: str | int) -> int:
    """A number of tokens of a sequence."""
    return whole_number(text, 1, MOST_TOKENS)


def seed_and_folder(text: str, option: str = "--policy") -> tuple[int, Path]:
    """The seed and the folder of `SEED=FOLDER`, an option's value; raises StudyError for any other form."""
    seed, separator, folder = text.partition("=")
    if not separator or not (seed.isascii() and seed.isdigit()):
        raise ConfigurationError(f"{option} {text}: write it as SEED=FOLDER")
    return int(seed), Path(folder)
