"""Limits of the system: what a job needs at least, what reading data may take, and the sentence where one is met."""

import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrl.runtime.errors import StudyError, reason

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
        raise StudyError(
            f"ulimit -v allows {limit / 1e6:.0f} MB of address space, and a job's libraries alone need "
            f"{LEAST_ADDRESS_SPACE / 1e6:.0f} MB: raise it, for instance by ulimit -v unlimited"
        )


def enough_shared_memory(ranks: int) -> None:
    """Raises StudyError if /dev/shm is too small for so many ranks with a GPU each, which NCCL would fail on later."""
    free, needed = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0, ranks * LEAST_SHARED
    if free < needed:
        raise StudyError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, and NCCL needs {needed / 1e6:.0f} MB for {ranks} ranks:"
            " start the container with --shm-size=1g or more, or mount a memory volume there in a pod"
        )


def out_of_memory(error: BaseException | None) -> str | None:
    """The sentence for an error that comes from a lack of memory, directly or by its causes; None for any other."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, Exception) and _REFUSED.search(str(error))):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            allowed = f"; ulimit -v allows {limit / 1e6:.0f} MB" if limit >= 0 else ""
            allowed = _ON_GPU if "CUDA" in str(error) else allowed
            return f"no memory is left ({reason(error)}){allowed}"
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def limited_memory(size: float, what: str) -> Iterator[None]:
    """Lets this process take up to `size` bytes of memory more within the block.

    Raises:
        StudyError: the block, named by `what`, takes more.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = 1024 * int(re.findall(r"^VmData:\s*(\d+) kB", status, re.MULTILINE)[0])
    limits = [limit for limit in (used + int(size), *before) if limit >= 0]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    except MemoryError:
        raise StudyError(f"{what}: takes more than {size / 1e9:g} GB of memory to read") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
