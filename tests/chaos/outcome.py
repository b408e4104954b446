"""What a finished study holds that no clock has a part in, and whether it is the same to the bit."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from tailrl.claims.catalogue import TRAINED_CLAIMS

TIMED = ("logs", "benchmarks", "wandb")
"""Folders whose files have a time in their name or their content alone."""
CLOCKED = ("summary.html", "time.csv", "time.svg", "time.pdf")
"""Files of which no more is compared than that they are there."""
SNAKEMAKES = ".snakemake_timestamp"
"""What Snakemake leaves in a folder that a job made, unless it was killed before the job ended: not a result."""
HISTORY = {"startup_seconds", "wall_seconds", "resumed_at_steps", "sampler_self_test"}
"""Of a run's record, what tells how it came about. A process tests its engine with the weights that it starts from, so
that after an interruption the self-test finds another number."""
TIMED_CLAIMS = tuple(claim.id for claim in TRAINED_CLAIMS if claim.family == "price")
TOLD = (
    "- Wall time of the jobs",
    "- Generation, forward, backward and optimizer",
    "- Went on from a checkpoint after an interruption",
)
"""Beginnings of the summary's lines that tell how it came about, and how long it took."""


def final(results: Path) -> dict[str, Any]:
    """Everything of the results that no clock has a part in, file by file."""
    files = {str(file.relative_to(results)): file for file in results.rglob("*") if file.is_file()}
    own = {name: file for name, file in files.items() if file.name != SNAKEMAKES}
    kept = {name: file for name, file in own.items() if name.partition("/")[0] not in TIMED}
    return {"list of files": sorted(kept)} | {
        name: content(file) for name, file in sorted(kept.items()) if file.name not in CLOCKED
    }


def content(file: Path) -> object:
    """What a file says without its times: records where it has a known form, or else its bytes."""
    match file.name:
        case "metrics.jsonl":
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines]
        case "run.json":
            record = json.loads(file.read_text(encoding="utf-8"))
            return {name: value for name, value in record.items() if name not in HISTORY}
        case "manifest.json":
            manifest = json.loads(file.read_text(encoding="utf-8"))
            timed = {name: "" for name in ("metrics.jsonl", "run.json") if name in manifest["outputs"]}
            return manifest | {"outputs": manifest["outputs"] | timed}
        case "tokens.npz":
            with np.load(file) as arrays:
                return {name: (str((a := arrays[name]).dtype), a.shape, a.tobytes()) for name in arrays.files}
        case "summary.md":
            told = tuple(f" | `{claim}` |" for claim in TIMED_CLAIMS)
            lines = file.read_text(encoding="utf-8").splitlines()
            return [line for line in lines if not line.startswith(TOLD) and not line.endswith(told)]
        case "claims.csv":
            lines = file.read_text(encoding="utf-8").splitlines()
            return [line for line in lines if not line.startswith(TIMED_CLAIMS)]
        case _:
            return file.read_bytes()


def tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bits of each tensor of a .safetensors file; raises ValueError where it is damaged."""
    try:
        found = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        return {name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in found}
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def resumed(run: Path) -> list[int]:
    """The steps at which a finished run went on after an interruption."""
    steps = json.loads((run / "run.json").read_text(encoding="utf-8"))["resumed_at_steps"]
    return [int(step) for step in steps]


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Fails with the names of what is not the same to the bit; of a record, with its fields."""
    differing = []
    for name in _differing(found, expected):
        before, after = expected.get(name), found.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            name = f"{name} ({', '.join(_differing(after, before))})"
        differing.append(name)
    if differing:
        sys.exit(f"not as undisturbed: {', '.join(differing)}")


def _differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    return [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
