"""A log read with a progress bar."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tailrl.diagnosis.folders import log_files
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log


def read_with_progress(
    paths: Sequence[Path], left_out: LeftOut | None = None, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Log]]:
    """The same as `read_log`, with a bar on stderr where that is a terminal."""
    total = sum(file.stat().st_size for file in log_files(paths, LeftOut()) if file.exists())
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        yield from read_log(paths, lambda size: progress.advance(task, size), left_out, columns)
