"""The per-token records of the steps that are kept, each in a file of its own until the run is finished.

They grow with the run: neither the trainer's memory nor a checkpoint holds more of them than steps and checksums.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from tailrl.errors import StudyError, reason
from tailrl.training.files import checksum, write_whole

ASIDE = "writing-tokens.safetensors"

Arrays = Mapping[str, NDArray[np.generic]]


class KeptTokens:
    """The records of one run.

    Attributes:
        checksums: SHA-256 of each step's file, by the step, in the steps' order.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Args:
        folder: where the files lie, beside the run's checkpoints.
        name: of the run, part of each file's name: what a run with other settings has kept is no part of this one.
        """
        self.folder = folder
        self.name = name
        self.checksums: dict[int, str] = {}

    def keep(self, step: int, arrays: Arrays) -> None:
        """Write the arrays of a step, which have a length in common; raises StudyError where the disk refuses."""
        data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        try:
            write_whole(data, self.folder / ASIDE, self._file(step))
        except OSError as error:
            (self.folder / ASIDE).unlink(missing_ok=True)
            raise StudyError(
                f"{self.folder}: the tokens of step {step} could not be kept ({reason(error)}): they need "
                f"{len(data) / 1e6:.1f} MB"
            ) from None
        self.checksums[step] = hashlib.sha256(data).hexdigest()

    def joined(self) -> dict[str, NDArray[np.generic]]:
        """All arrays, one step after the other; none where no step was kept."""
        parts = [load(self._file(step).read_bytes()) for step in self.checksums]
        return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def state(self) -> list[tuple[int, str]]:
        """What a checkpoint holds of it, ready for JSON."""
        return list(self.checksums.items())

    def check(self, state: Iterable[tuple[int, str]]) -> dict[int, str]:
        """`checksums` as `state` gave them; raises StudyError where a file is missing or damaged."""
        given = {int(step): str(digest) for step, digest in state}
        for step, digest in given.items():
            if checksum(self._file(step)) != digest:
                raise StudyError(f"the tokens of step {step} in {self._file(step).name} are damaged")
        return given

    def _file(self, step: int) -> Path:
        return self.folder / f"tokens-{step:08d}-{self.name}.safetensors"
