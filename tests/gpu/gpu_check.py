"""What a GPU must show before a study is trusted to it: one table, a row for each check, in about a quarter of an hour.

    make gpu-check                                                                # with the pinned environment
    PYTHONPATH=workflow:benchmarks python tests/gpu/gpu_check.py --out check.csv  # torch, transformers, pydantic

`gpu_rows.py`, `gpu_runs.py` and `gpu_memory.py` hold the checks. Each stands alone: one that raises is a failed row,
and the rest goes on. A row whose package or device is not there says so. Nothing is fetched; W&B and lm-eval are not
used. On a CPU the sizes are small, and Triton's interpreter runs the kernels. `--only PART` makes the rows whose name
holds it. Exit code 1: some row failed.

Verdicts: `ok` and `failed` for what has a limit, `measured` for what has none, `not there` for what this machine lacks,
`refused` for what the project itself would not do on it.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gpu_rows as rows
import gpu_runs as runs
import torch
from gpu_memory import memory
from gpu_rows import LOG_RHO, Check, MissingError
from table import show, write_csv

CHECKS: dict[str, Check] = {
    "kernels, float32, ρ = e⁻¹³": partial(rows.kernels, torch.float32, "min_p", LOG_RHO),
    "kernels, bfloat16, ρ = e⁻¹³": partial(rows.kernels, torch.bfloat16, "min_p", LOG_RHO),
    "kernels, bfloat16, no mask": partial(rows.kernels, torch.bfloat16, "full", 0.0),
    "chunks, float32, top-k": rows.chunks,
    "time beside full logits": partial(rows.beside, rows.full_logits),
    "time beside Liger": partial(rows.beside, rows.liger),
    "varlen attention, bfloat16": rows.varlen,
    "packed row, float32": partial(runs.packed, torch.float32, 1e-4),
    "packed row, bfloat16": partial(runs.packed, torch.bfloat16, 0.03),
    "exact attention, float32": rows.exact_attention,
    "exact engine": runs.exact,
    "exact engine, large vocabulary": runs.exact_large,
    "steps, float32": partial(runs.step, "float32", 1e-2, runs.TRANSFORMERS),
    "steps, bfloat16": partial(runs.step, "bfloat16", 1e-2, runs.TRANSFORMERS),
    "steps, exact engine": partial(runs.step, "float32", 0.0, runs.EXACT),
    "steps, verified": runs.verified,
    "steps, experts": runs.experts,
    "steps, vLLM": partial(runs.vllm_step, 1e-2, {}),
    "steps, vLLM, compiled": partial(runs.vllm_step, 1e-2, {"enforce_eager": False}),
    "steps, vLLM, fp8 cache": partial(runs.vllm_step, None, {"kv_cache_dtype": "fp8_e4m3"}),
    "steps, vLLM, fp8": partial(runs.vllm_step, None, {"quantization": "fp8"}),
    "steps, vLLM, int8": partial(runs.vllm_step, None, {"quantization": "int8"}),
    "steps, vLLM, int4": partial(runs.vllm_step, None, {"quantization": "int4", "group_size": 32}),
    "checkpoint and resume": runs.resume,
    "memory beside the plan": memory,
}
VERSIONS = ("torch", "triton", "transformers", "liger_kernel", "vllm")


def row_of(name: str, check: Check, device: str) -> dict[str, object]:
    """One check's row; what it raises becomes its figure."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    try:
        found = check(device, rows.CUDA if device == "cuda" else rows.CPU).columns()
    # Each library raises its own kinds, and the other checks are to run whatever it is.
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("tailrl")
        known = error.verdict if isinstance(error, MissingError) else MissingError.verdict if missing else "failed"
        words = " ".join(str(error).split()).replace("|", "/")[:300]
        found = {"compared": "", "figure": "", "limit": "", "verdict": f"{known}: {words or type(error).__name__}"}
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"check": name, **found, "seconds": round(time.perf_counter() - begun, 1)}


def hardware(device: str) -> dict[str, object]:
    """What every row of the CSV says besides: machine, versions, commit."""
    from tailrl.runtime.provenance import provenance

    known = provenance()
    gpu = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {
        "device": gpu.name if gpu else known["hardware"]["cpu"],
        "memory_gb": round(gpu.total_memory / 1e9, 1) if gpu else known["hardware"]["memory_gb"],
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        **{package: _version(package) for package in VERSIONS},
        "commit": known["commit"] or "",
        "dirty": "" if known["dirty"] is None else known["dirty"],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def failed_rows(checks: Mapping[str, Check], out: Path | None) -> int:
    """Make every row, print the table, write the CSV; returns how many rows failed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    same = hardware(device)
    print(", ".join(f"{name} {value}" for name, value in same.items() if value != ""), file=sys.stderr, flush=True)
    made = []
    for name, check in checks.items():
        made.append(row_of(name, check, device))
        print(
            f"{name}: {made[-1]['verdict']}, {made[-1]['figure']} ({made[-1]['seconds']} s)",
            file=sys.stderr,
            flush=True,
        )
        if out:  # after each check: what a machine is lent for may end before the last one
            write_csv([{**row, **same} for row in made], out)
    show(made, None)
    return sum(str(row["verdict"]).startswith("failed") for row in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a CSV file")
    parser.add_argument("--only", metavar="PART", default="", help="the checks whose name holds this")
    arguments = parser.parse_args()
    checks = {name: check for name, check in CHECKS.items() if arguments.only in name}
    if not checks:
        parser.error(f"--only: no check is named so; there are: {'; '.join(CHECKS)}")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    os.environ["WANDB_MODE"] = "disabled"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms need
    sys.exit(min(1, failed_rows(checks, arguments.out)))


if __name__ == "__main__":
    main()
