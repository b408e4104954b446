"""Data that grow with a run's steps: every step's metrics, and the per-token records of the kept steps.

They are files beside the checkpoints until the run is finished. The trainer's memory and a checkpoint hold only their
lengths and checksums. File names contain the run's name, which excludes data of a run with other settings.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from tailrl.runtime.atomic_files import DamagedError, write_whole
from tailrl.runtime.errors import StorageError, reason
from tailrl.runtime.jsonl import numbered_lines

UNFINISHED = "writing-tokens.safetensors"


class KeptMetrics:
    """The metrics of every step so far, one line of JSON each.

    The file may be longer than `length`: lines that an earlier process wrote after its last checkpoint are overwritten.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"metrics-{name}.jsonl"
        self.length = 0
        self.hash = hashlib.sha256()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Write the next step's metrics; raises StudyError where the disk refuses or has lost earlier lines."""
        line = json.dumps(metrics).encode() + b"\n"
        try:
            self.file.touch()
            with self.file.open("r+b") as file:
                # Writing beyond the end would fill the gap with zeros.
                if file.seek(0, os.SEEK_END) < self.length:
                    raise DamagedError(self.file, f"the metrics in {self.file.name} are damaged")
                file.truncate(self.length)
                file.seek(self.length)
                file.write(line)
        except OSError as error:
            raise StorageError(
                f"{self.file}: a step's metrics, {len(line)} bytes, could not be kept: {reason(error)}"
            ) from None
        self.length += len(line)
        self.hash.update(line)

    def read(self) -> list[dict[str, float]]:
        """The metrics of every step so far; raises StudyError as `check` does."""
        lines = numbered_lines(io.BytesIO(self.check(self._state())), self.file)
        return [json.loads(line) for _, line in lines]

    def settle(self) -> dict[str, Any]:
        """Flush the lines to the disk; returns their length and checksum for a checkpoint's JSON. Raises OSError."""
        if self.length:
            with self.file.open("rb") as file:
                os.fsync(file.fileno())
        return self._state()

    def check(self, settled: Mapping[str, Any]) -> bytes:
        """The lines that `settle` described.

        Raises:
            DamagedError: they are missing or changed.
            StudyError: they cannot be read, but may be whole.
        """
        lines = _read(self.file, settled["length"])
        if hashlib.sha256(lines).hexdigest() != settled["checksum"]:
            raise DamagedError(self.file, f"the metrics in {self.file.name} are damaged")
        return lines

    def restore(self, lines: bytes) -> None:
        """Go on from these lines, which `check` returned."""
        self.length, self.hash = len(lines), hashlib.sha256(lines)

    def _state(self) -> dict[str, Any]:
        return {"length": self.length, "checksum": self.hash.hexdigest()}


class KeptTokens:
    """The per-token records of the kept steps, one file each."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.checksums: dict[int, str] = {}  # SHA-256 of each step's file, by step, in order

    def keep(self, step: int, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Write a step's arrays, all of one length; raises StudyError where the disk refuses."""
        data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        try:
            write_whole(data, self.folder / UNFINISHED, self._file(step))
        except OSError as error:
            (self.folder / UNFINISHED).unlink(missing_ok=True)
            raise StorageError(
                f"{self.folder}: the tokens of step {step} could not be kept ({reason(error)}): they need "
                f"{len(data) / 1e6:.1f} MB"
            ) from None
        self.checksums[step] = hashlib.sha256(data).hexdigest()

    def joined(self) -> dict[str, NDArray[np.generic]]:
        """All arrays, concatenated over the kept steps; empty without any. Raises StudyError as `check` does."""
        parts = [load(self._bytes(step, digest)) for step, digest in self.checksums.items()]
        # Sorted: safetensors gives its arrays in any order, and equal runs are to give equal files.
        return {name: np.concatenate([part[name] for part in parts]) for name in (sorted(parts[0]) if parts else ())}

    def state(self) -> list[tuple[int, str]]:
        """The checksums for a checkpoint's JSON."""
        return list(self.checksums.items())

    def check(self, state: Iterable[tuple[int, str]]) -> dict[int, str]:
        """`checksums` from what `state` returned.

        Raises:
            DamagedError: a file is missing or damaged.
            StudyError: a file cannot be read, but may be whole.
        """
        given = {int(step): str(digest) for step, digest in state}
        for step, digest in given.items():
            self._bytes(step, digest)
        return given

    def _bytes(self, step: int, digest: str) -> bytes:
        file = self._file(step)
        data = _read(file)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DamagedError(file, f"the tokens of step {step} in {file.name} are damaged")
        return data

    def _file(self, step: int) -> Path:
        return self.folder / f"tokens-{step:08d}-{self.name}.safetensors"


def _read(file: Path, length: int = -1) -> bytes:
    """The first bytes of a file, by default all; none where it is missing. Raises StudyError where it is unreadable."""
    try:
        with file.open("rb") as opened:
            return opened.read(length)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {reason(error)}") from None
