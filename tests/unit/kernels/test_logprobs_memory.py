"""What the fast log-prob takes of the system's memory, by the system's own count."""

import subprocess
import sys

import pytest
from cases_fixture import rest_long


@pytest.mark.slow  # `test_logprobs.py` counts the rows of a chunk
@pytest.mark.parametrize("log_rho", rest_long((-13.0,), (None, -13.0)))
def test_the_process_does_not_grow_with_the_rows(log_rho: float | None) -> None:
    """What stays of a chunk must lie in no hole that a large piece left: the next one would fit in no more.

    MiB in a process of its own, by the system's high-water mark. A chunk takes 4, the inputs and their gradients 10,
    what is kept 2; tokens x vocabulary would be 256.
    """
    script = """if True:
        import gc, sys
        from pathlib import Path
        import torch
        from tailrl.kernels import logprobs

        logprobs.KEPT_BYTES = 2**21
        def mark():
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

        def run(rows, log_rho):
            hidden, weight = (torch.randn(n, 64, requires_grad=True) for n in (rows, 4096))
            rule = ("full", 0.0) if log_rho is None else ("min_p", log_rho)
            found = logprobs.constrained_logprobs(hidden, weight, torch.randint(0, 4096, (rows,)), *rule)
            (found.logp_T * torch.randn(rows)).sum().backward()

        torch.manual_seed(0)
        log_rho = float(sys.argv[1]) if sys.argv[1:] else None
        run(128, log_rho)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = mark()
        run(16384, log_rho)
        print(mark() - before)
    """
    command = [sys.executable, "-c", script, *([] if log_rho is None else [str(log_rho)])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 60
