"""What is fuzzed: one `Kind` each of study files, result files, data rows and model folders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

Case = tuple[str, bytes]
"""A file's path within the kind's folder, and its damaged content."""


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        name: of the kind.
        prepare: writes a folder that is well.
        cases: damaged files without end.
        read: reads the folder in which one file is damaged, as the project does; the file's path is given. It raises
            StudyError where it refuses, and any other exception is a finding.
    """

    name: str
    prepare: Callable[[Path], None]
    cases: Callable[[Random], Iterator[Case]]
    read: Callable[[Path, str], None]
