"""Pickles: torch's own with tensors and plain values are loaded, those of classes are refused with a way out."""

import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import DataError, StorageError, StudyError, reason
from tailrl.runtime.extras import not_installed

MOST_BYTES_LOOKED_AT = 1_000_000  # of a pickle: the classes stand at its beginning


def load_torch(stream: IO[bytes], file: Path) -> Any:
    """What `torch.save` wrote, if it is tensors and plain values; nothing else is unpickled.

    Raises:
        StudyError: torch is not installed, the file is damaged, or it holds objects of classes.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        needs = not_installed(error, str(file))
        raise DataError(f"{needs}; or save the columns with numpy.savez_compressed") from None
    try:
        if not zipfile.is_zipfile(stream):
            raise DataError(f"{file}: cannot be read: it is not what torch.save writes")
        stream.seek(0)
        with torch.serialization.safe_globals(_plain_numpy()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # torch and zipfile have their own, and so has what torch unpickles with
        if type(error).__name__ != "UnpicklingError":
            raise StorageError(f"{file}: cannot be read: {reason(error)}") from None
    stream.seek(0)
    with zipfile.ZipFile(stream) as packed:
        name = next((name for name in packed.namelist() if name.endswith("data.pkl")), "")
        raise refuse_pickle(packed.open(name) if name else stream, file)


def _plain_numpy() -> list[Any]:
    """What pickles of numpy's arrays and numbers name; none of it runs code."""
    scalar = np.float64(0).__reduce__()[0]
    rebuild = np.zeros(1).__reduce__()[0]
    kinds = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    return [scalar, rebuild, np.ndarray, np.dtype, *kinds]


def refuse_pickle(stream: IO[bytes], file: Path) -> StudyError:
    """Why a pickle of classes is not loaded, and the line that turns it into columns."""
    classes = _classes(stream.read(MOST_BYTES_LOOKED_AT))
    ways = yaml_beside(__file__, "pickles.yaml")
    way = next((line for name, line in ways.items() if any(name in one for one in classes)), ways["other"])
    of = f" such as {classes[0]}" if classes else ""
    return DataError(
        f"{file}: cannot be read: it holds other objects than tensors and plain values{of}, which could run code; they "
        f"are not loaded. Where you trust it, turn it into columns: {way.format(file=file.name, stem=file.stem)}"
    )


def _classes(data: bytes) -> list[str]:
    """The names of the classes in a pickle, module and all, without executing it; those of torch come last."""
    names: list[str] = []
    strings: list[str] = []
    try:
        for opcode, value, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                names.append(str(value).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                names.append(".".join(strings[-2:]))
            elif isinstance(value, str):
                strings.append(value)
    except Exception:  # cut where the look ended, or damaged
        pass
    plain = ("torch.", "collections.", "numpy.", "builtins.")
    return sorted(dict.fromkeys(names), key=lambda name: name.startswith(plain))
