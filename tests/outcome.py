"""What a finished study holds that no clock has a part in, and whether it is the same to the bit."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TABLES = ("evaluation", "differences", "claims", "survival", "policies", "training", "mismatch", "delta", "kept")
TIMED = ("logs", "benchmarks", "wandb")
"""Folders whose files have a time in their name or their content alone."""


def final(results: Path) -> dict[str, Any]:
    """Everything of the results that no clock has a part in."""
    files = [file.relative_to(results) for file in results.rglob("*") if file.is_file()]
    found: dict[str, Any] = {
        "list of files": sorted(map(str, (file for file in files if file.parts[0] not in TIMED))),
        "base": (results / "base/model.safetensors").read_bytes(),
    }
    for run in sorted((results / "train").glob("*/seed*")):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        name = str(run.relative_to(results))
        found[f"{name} metrics"] = [
            {k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines
        ]
        found[f"{name} weights"] = (run / "policy/model.safetensors").read_bytes()
        with np.load(run / "tokens.npz") as tokens:
            found[f"{name} tokens"] = {key: tokens[key].tobytes() for key in tokens.files}
    for file in sorted((results / "eval").iterdir()):
        found[file.name] = file.read_bytes()
    for table in TABLES:
        found[f"{table}.csv"] = (results / "tables" / f"{table}.csv").read_bytes()
    return found


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Fails with the names of what is not the same to the bit."""
    differing = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    if differing:
        sys.exit(f"not as undisturbed: {', '.join(differing)}")
