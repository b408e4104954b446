"""Frameworks' own functions beside ours on the same tokens: metrics, and the weights that `replay.yaml`'s lines set.

    python benchmarks/framework_metrics.py --verl PATH --nemo-rl PATH --prime-rl PATH --slime PATH --skyrl PATH \\
        --openrlhf PATH --out docs/results/framework_metrics.csv

A PATH is a checkout. Its functions are taken out of its files and executed without its other imports, so that no
framework must be installed. Each row has a number of theirs and ours, float64, on 64 responses of 1 to 60 tokens with
a mismatch of 0.3 nats. Of weights `theirs` and `ours` are the means over tokens, and `difference` is the largest of a
token's, relative where the weight exceeds 1. Where a framework gives only a loss, `theirs` is its loss at an unchanged
policy, `ours` is −(1/T) Σ w_t A_t. It fails where a relative difference exceeds 1e-6.
"""

import argparse
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from framework_calls import METRICS, WEIGHTS, Batch, make_batch
from table import write_csv
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.metrics import named_metrics
from tailrl.diagnosis.replay import catalogue, configuration
from tailrl.objective.corrections import correct, normaliser

MOST = 1e-6
"""The largest relative difference."""

Row = dict[str, Any]


def compare(checkouts: Mapping[str, Path], batch: Batch) -> Iterator[Row]:
    """The rows of the table."""
    log = {"sampler_logprobs": batch.rows(batch.infer_NL), "trainer_logprobs": batch.rows(batch.train_NL)}
    ours = {(one.framework, one.name): one.value.mean for one in named_metrics(diagnose(log).measured)}
    for framework, path in checkouts.items():
        version = subprocess.check_output(["git", "-C", path, "rev-parse", "--short=7", "HEAD"], text=True).strip()
        about = {"framework": framework, "version": version, "date": datetime.now(UTC).date().isoformat()}
        if framework in METRICS:
            for source, name, value in METRICS[framework](path, batch):
                if (own := ours.get((framework, name))) is not None:
                    yield about | line(source, name, value, own, abs(value - own))
        if framework in WEIGHTS:
            yield from (about | found for found in compare_weights(framework, path, batch))


def compare_weights(framework: str, path: Path, batch: Batch) -> Iterator[Row]:
    """What a framework's lines of `replay.yaml` do to the batch, for every remedy that it has."""
    for name, remedy in catalogue().remedies.items():
        for threshold, given in remedy.settings() if framework in remedy.lines else ():
            [lines] = [one for one in configuration(name, threshold) if one.framework == framework]
            source, theirs = WEIGHTS[framework](path, batch, lines.text)
            assert isinstance(given, Correction)
            own_NL = our_weights(batch, given)
            if theirs.dim():
                kind, of_theirs, of_ours = "weights", theirs[batch.mask_NL].mean(), own_NL[batch.mask_NL].mean()
                difference = ((theirs - own_NL).abs() / own_NL.clamp(min=1)).max().item()
            else:
                kind, of_theirs, of_ours = "loss", theirs, -(own_NL * batch.advantage_NL)[batch.mask_NL].mean()
                difference = (of_theirs - of_ours).abs().item()
            yield line(source, f"{kind} of {name} at {threshold:g}", of_theirs.item(), of_ours.item(), difference)


def our_weights(batch: Batch, given: Correction) -> Tensor:
    """The objective's weights [N, L], 0 in the padding."""
    count = len(batch.mask_NL)
    sequence_T = torch.arange(count)[:, None].expand_as(batch.mask_NL)[batch.mask_NL]
    delta_T = (batch.train_NL - batch.infer_NL)[batch.mask_NL]
    outside_T = torch.zeros_like(delta_T, dtype=torch.bool)
    more = (values_NL[batch.mask_NL] for values_NL in (batch.infer_NL, batch.advantage_NL))
    found = correct(delta_T, outside_T, sequence_T, count, given, None, *more)
    weight_T = found.weight_T / normaliser(given, found.ratio_X)
    return torch.zeros_like(batch.train_NL).masked_scatter(batch.mask_NL, weight_T)


def line(source: str, quantity: str, theirs: float, ours: float, difference: float) -> Row:
    """The numbers of a row."""
    return {
        "quantity": quantity,
        "theirs": f"{theirs:.12g}",
        "ours": f"{ours:.12g}",
        "difference": f"{difference:.2g}",
        "source": source,
    }


def wrong(row: Row) -> bool:
    """Whether a row's numbers differ."""
    return not float(row["difference"]) <= MOST * max(1.0, abs(float(row["theirs"])))


def main() -> None:
    """Compares, writes the table and fails at a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    frameworks = sorted(METRICS | WEIGHTS)
    for framework in frameworks:
        parser.add_argument(f"--{framework.lower()}", type=Path, metavar="PATH", help=f"a checkout of {framework}")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    given = vars(parser.parse_args())
    paths = {framework: given[framework.lower().replace("-", "_")] for framework in frameworks}
    rows = list(compare({name: path for name, path in paths.items() if path is not None}, make_batch()))
    if not rows:
        raise SystemExit("no checkout is given")
    write_csv(rows, given["out"])
    print(f"{len(rows)} numbers compared, the largest difference {max(float(row['difference']) for row in rows):.2g}")
    differs = [row for row in rows if wrong(row)]
    for row in differs:
        print("differs:", row)
    raise SystemExit(bool(differs))


if __name__ == "__main__":
    main()
