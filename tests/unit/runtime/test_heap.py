"""What torch freed on a CPU goes back to the system, where it would otherwise stay and not be used again."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from pathlib import Path
from tailrl.runtime import heap

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.ones(30 * 2**20, dtype=torch.uint8)  # freed, it lifts glibc's limit for what has a mapping of its own
heap.IDLE_BYTES = {idle}
before = resident()
held = [torch.ones(2**20, dtype=torch.uint8) for _ in range({count})]
last = torch.ones(2**20, dtype=torch.uint8)  # so that the system could take nothing from the end of the heap
full = resident()
del held
heap.give_back_freed()
print((resident() - before) / (full - before))
"""


@pytest.mark.parametrize(
    ("idle", "least", "most"),
    [(2**24, float("-inf"), 0.1), pytest.param(2**28, 0.9, 1.1, marks=pytest.mark.slow)],
)
def test_much_freed_memory_goes_back_and_little_stays(idle: int, least: float, most: float) -> None:
    """128 MiB, with a limit of 16 and of 256. A system short of memory may take more than was freed."""
    program = PROGRAM.format(idle=idle, count=128)
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert least <= float(ended.stdout) <= most
