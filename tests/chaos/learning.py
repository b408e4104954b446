"""Whether every run of a finished study has learned: a comparison of weights that never move proves nothing."""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import tensors

from tailrl.tracking.metrics import GRADIENT_NORM

WARM_START: dict[str, Any] = {
    "policy.warm_start": {
        "stages": [{"name": "arithmetic", "problems": 4500, "terms": [2, 3], "largest": 15, "seed": 1}],
        "batch": 8,
    },
}
"""A base policy that gets about one sum in seven right."""
LEARNS: dict[str, Any] = {"task.largest": 15, "training.group_size": 8, "evaluation.task.largest": 15}
"""Changes of studies/tiny.yaml, with which such a policy learns."""
WITH_GRADIENT = 0.5
"""Smallest share of a run's steps that must have a gradient. A step where all responses earn the same has none."""


def demand_learning(results: Path, runs: Sequence[Path]) -> dict[str, float]:
    """Ends the script with one sentence that names the first run that has not learned.

    A run has learned if enough of its steps have a gradient and if its policy's weights are new. They may be neither
    the base policy's nor another run's.

    Args:
        results: the study's folder.
        runs: the folders of its runs.

    Returns:
        For each run its share of steps with a gradient.
    """
    shares, owners = {}, {_weights(results / "base", results): "the base policy"}
    for run in runs:
        name = str(run.relative_to(results))
        shares[name] = _with_gradient(run / "metrics.jsonl", name)
        if shares[name] < WITH_GRADIENT:
            sys.exit(f"{name}: only {shares[name]:.0%} of its steps have a gradient, so kills compare almost nothing")
        weights = _weights(run / "policy", results)
        if weights in owners:
            sys.exit(f"{name}: its weights are those of {owners[weights]}, so kills compare weights that never move")
        owners[weights] = name
    return shares


def _with_gradient(metrics: Path, name: str) -> float:
    """The share of steps whose gradient norm is a positive number; NaN and null are none."""
    try:
        norms = [json.loads(line)[GRADIENT_NORM] for line in metrics.read_text(encoding="utf-8").splitlines()]
        positive = sum(norm is not None and 0 < norm < float("inf") for norm in norms)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{name}: no gradient norms in {metrics.name}: {error!r}")
    return positive / len(norms) if norms else 0.0


def _weights(policy: Path, results: Path) -> str:
    """SHA-256 of all tensors of a policy, with their names, types and shapes."""
    digest = hashlib.sha256()
    try:
        files = sorted(policy.glob("*.safetensors"))
        for file in files:
            for name, (dtype, shape, data) in sorted(tensors(file).items()):
                digest.update(f"{name} {dtype} {shape} ".encode() + data)
    except (OSError, ValueError) as error:
        sys.exit(f"{policy.relative_to(results)}: its weights cannot be read: {error}")
    if not files:
        sys.exit(f"{policy.relative_to(results)}: holds no weights")
    return digest.hexdigest()
