"""What `ps` shows as a process's command."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

PADDING = " " * 30_000
"""An argument that leaves room for any job's arguments."""
ARG_START, ARG_END = 45, 46
"""Where /proc/self/stat has the addresses of the arguments, counted behind the command's name."""


def set_title(words: Sequence[str]) -> None:
    """Replaces this process's arguments, as others see them; what finds no room is cut off."""
    numbers = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(numbers[ARG_START]), int(numbers[ARG_END])
    if start:  # else the system hides them
        text = "\0".join(words).encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
