"""Memory that torch freed on a CPU, given back to the system.

glibc's `posix_memalign`, by which torch allocates, asks for more than the size to align it. A freed piece of exactly
this size therefore does not serve the next tensor of the same size (glibc bug 14581), and each long micro-batch would
take new memory beside what the one before freed.
"""

import ctypes
import ctypes.util
from functools import cache
from typing import ClassVar

IDLE_BYTES = 256 * 2**20
"""Freed memory that stays for the next tensors. Less is not worth the page faults of asking for it again."""


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _library() -> ctypes.CDLL | None:
    """The C library; None where it is not glibc 2.33 or later."""
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _Info
    return library


def give_back_freed() -> None:
    """Give freed memory back to the system where there is more than `IDLE_BYTES` of it."""
    library = _library()
    if library is not None and library.mallinfo2().fordblks > IDLE_BYTES:
        library.malloc_trim(0)
