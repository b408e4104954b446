"""Files that are whole or not there, and their checksums."""

import hashlib
import os
from pathlib import Path

from tailrl.errors import StudyError, reason


def checksum(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal; raises StudyError where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise StudyError(f"{file}: cannot be read: {reason(error)}") from None


def write_whole(data: bytes, aside: Path, path: Path) -> None:
    """Write a file aside and move it to its place in one go: whole or not there, after a power cut too."""
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
