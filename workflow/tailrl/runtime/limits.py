"""Limits of the system: what a job needs at least, what reading a user's file may take, and the sentences for both."""

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tailrl.runtime.errors import ConfigurationError, DataError, reason

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

Value = TypeVar("Value")

MEMORY = 2e9  # bytes of memory that reading a user's file may take
STACK = 8_000_000  # bytes of a thread's stack
STATUS = Path("/proc/self/status")  # Linux's account of this process
MOST_EMPTY_LINES = 1_000_000  # of a text file; compressed they take nothing

LEAST_ADDRESS_SPACE = 2e9
"""Bytes. Torch and SciPy map 1.6 GB when imported. With less, OpenBLAS asks for memory in an endless loop."""

SHARED_MEMORY, LEAST_SHARED = Path("/dev/shm"), 64e6
"""Where NCCL exchanges tensors within a machine, and bytes for each rank. A container has 64 MB by default."""

_REFUSED = re.compile(r"allocate memory|failed to map segment|CUDA out of memory")
"""What the system, torch and the dynamic linker say where no memory is left; Python has MemoryError."""

_ON_GPU = "; on a GPU a smaller training.token_budget or sampler.gpu_memory_utilization may help"


def enough_address_space() -> None:
    """Raises StudyError if `ulimit -v` is too small for a job's libraries."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < LEAST_ADDRESS_SPACE:
        raise ConfigurationError(
            f"ulimit -v allows {limit / 1e6:.0f} MB of address space, and a job's libraries alone need "
            f"{LEAST_ADDRESS_SPACE / 1e6:.0f} MB: raise it, for instance by ulimit -v unlimited"
        )


def enough_shared_memory(ranks: int) -> None:
    """Raises StudyError if /dev/shm is too small for so many ranks with a GPU each, which NCCL would fail on later."""
    free, needed = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0, ranks * LEAST_SHARED
    if free < needed:
        raise ConfigurationError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, and NCCL needs {needed / 1e6:.0f} MB for {ranks} ranks:"
            " start the container with --shm-size=1g or more, or mount a memory volume there in a pod"
        )


def out_of_memory(error: BaseException | None) -> str | None:
    """The sentence for an error that comes from a lack of memory, directly or by its causes; None for any other."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, Exception) and _REFUSED.search(str(error))):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0] if resource else -1
            allowed = f"; ulimit -v allows {limit / 1e6:.0f} MB" if limit >= 0 else ""
            allowed = _ON_GPU if "CUDA" in str(error) else allowed
            return f"no memory is left ({reason(error)}){allowed}"
        error = error.__cause__ or error.__context__
    return None


def regular(path: str, flags: int) -> int:
    """An opener for `open` that raises OSError for a named pipe, a socket or a device, which may never end."""
    mode = Path(path).stat().st_mode
    kinds = {
        "a named pipe": stat.S_ISFIFO(mode),
        "a socket": stat.S_ISSOCK(mode),
        "a device": stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", path)
    return os.open(path, flags)


@contextmanager
def limited_memory(size: float, what: str) -> Iterator[None]:
    """Lets this process take up to `size` bytes of memory more within the block; Linux alone counts them.

    Raises:
        StudyError: the block, named by `what`, takes more.
    """
    with _limited(_most(size), size, what):
        yield


def in_limited_memory(values: Iterable[Value], size: float, what: str) -> Iterator[Value]:
    """The values of an iterator, which may take up to `size` bytes of memory more than this process has now.

    What the caller keeps counts too. The limit holds while a value is made, not while the caller uses it.

    Raises:
        StudyError: the next value, of what is named by `what`, does not fit.
    """
    most, iterator = _most(size), iter(values)
    while True:
        with _limited(most, size, what):
            try:
                value = next(iterator)
            except StopIteration:
                return
        yield value


def _most(size: float) -> int | None:
    """Bytes that RLIMIT_DATA may count once this process has taken `size` more; None where the system counts nothing.

    A library may start a thread for each core meanwhile, whose whole stack counts.
    """
    if resource is None or not STATUS.exists():
        return None
    used = 1024 * int(re.findall(r"^VmData:\s*(\d+) kB", STATUS.read_text(encoding="ascii"), re.MULTILINE)[0])
    return used + int(size) + (os.cpu_count() or 1) * STACK


@contextmanager
def _limited(most: int | None, size: float, what: str) -> Iterator[None]:
    if most is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (most, *before) if limit >= 0]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has a RuntimeError
        if out_of_memory(error) is None:
            raise
        raise DataError(f"{what}: takes more than {size / 1e9:g} GB of memory to read") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
