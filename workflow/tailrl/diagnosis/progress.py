"""A log read with a progress bar."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import log_files, read_log


def read_with_progress(paths: Sequence[Path]) -> Iterator[tuple[str, Log]]:
    """The same as `read_log`, with a bar on stderr where that is a terminal."""
    total = sum(file.stat().st_size for file in log_files(paths))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        yield from read_log(paths, lambda size: progress.advance(task, size))
