"""What a checkpoint is on the disk: a folder of parts, to which each rank adds its own.

`torch.distributed.checkpoint` writes them, for one rank too, as safetensors, so that nothing is ever unpickled.
`checkpoint.json` has the length and SHA-256 of each part, and the folder's name ends with the start of its own SHA-256.
Any number of ranks reads a folder, each its own share alone.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tailrl.runtime import distributed
from tailrl.runtime.atomic_files import DamagedError, checksum

HEADER = "checkpoint.json"
"""Fingerprint and numbers of the state, and its parts."""
PART_BYTES = 8 * 2**30
"""Whole tensors of so many bytes go into a part of each rank, which holds its share of them twice as it writes."""

Sizes = dict[str, tuple[torch.Size, torch.dtype]]
"""Of a checkpoint's whole tensors, by name."""


def write_parts(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, dict[str, Any]]:
    """Write this rank's share of the tensors into the folder; returns length and SHA-256 of all ranks' parts, by name.

    Every rank must call. The files are on the disk, and the folder is not.

    Raises OSError on all ranks where the disk refuses one.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    numbers, size = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + size // PART_BYTES
        size += tensor.nbytes
    writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
    with _as_raised(), _alone():
        state_dict_saver.save(dict(tensors), storage_writer=writer)

    def described() -> dict[str, dict[str, Any]]:
        # Its own, by the name that they are given: another machine's may not be seen at once.
        files = folder.glob(f"shard-{distributed.number() + 1:05d}-*")
        return {file.name: {"length": file.stat().st_size, "sha256": checksum(file)} for file in files}

    found = distributed.gathered(distributed.in_step(described))
    return {name: part for share in found for name, part in share.items()}


def read_header(path: Path) -> dict[str, Any]:
    """A checkpoint's fingerprint, numbers and parts; raises OSError, TypeError or ValueError where there is none."""
    return dict(json.loads((path / HEADER).read_bytes()))


def check(path: Path) -> dict[str, Any]:
    """The header of a checkpoint that is as it was written: each rank reads its share of the files.

    Raises:
        DamagedError: it is damaged, or lacks a part, or has one that is not its own.
        StudyError: a file cannot be read, but may be whole.
        KeyError, OSError, TypeError, ValueError: it has no header.
    """
    named = path / HEADER
    _, _, digest = path.name.rpartition("-")
    if not named.is_file() or (distributed.is_first() and not checksum(named).startswith(digest)):
        raise DamagedError(named, f"damaged, since the checksum of its {HEADER} is not the one in its name")
    header = read_header(path)
    parts, found = header["parts"], {file.name for file in path.iterdir()} - {HEADER}
    for name in sorted(parts.keys() - found):
        raise DamagedError(path / name, f"its part {name} is missing")
    for name in sorted(found - parts.keys()):
        raise DamagedError(path, f"{name} in it is none of its parts")
    for name in sorted(parts)[distributed.number() :: distributed.count()]:
        file, known = path / name, parts[name]
        if not file.is_file() or file.stat().st_size != known["length"] or checksum(file) != known["sha256"]:
            raise DamagedError(file, f"its part {name} is damaged, since its checksum is not the one in {HEADER}")
    return header


def load(path: Path, blank: Callable[[Sizes], dict[str, Tensor]]) -> dict[str, Tensor]:
    """A checkpoint's tensors by name; of sharded ones this rank reads and gets its own share. Every rank must call.

    Args:
        path: of a checkpoint that `check` found whole.
        blank: makes empty tensors of these sizes, whole or sharded, for its result.

    Raises what `blank` raises, and KeyError, OSError, SafetensorError or ValueError, on all ranks if on any.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = HuggingFaceStorageReader(str(path))

    def prepared() -> dict[str, Tensor]:
        known = cast(dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata)
        return blank({name: (tensor.size, tensor.properties.dtype) for name, tensor in known.items()})

    tensors = distributed.in_step(prepared)
    with _as_raised(), _alone():
        state_dict_loader.load(tensors, storage_reader=reader)
    return tensors


@contextmanager
def _alone() -> Iterator[None]:
    """A process without others is told of no missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raises what a rank raised within `torch.distributed.checkpoint`, which wraps it, and is no Exception itself."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from None
