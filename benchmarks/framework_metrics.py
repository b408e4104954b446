"""Frameworks' own functions beside ours on the same tokens: metrics, and the weights that `replay.yaml`'s lines set.

    PEERS=FOLDER python benchmarks/framework_metrics.py --out docs/results/framework_metrics.csv [--only NAME ...]

The frameworks come from `peer_sources`: wheels at the versions of `peers.yaml`, and checkouts in FOLDER of those on no
index. With `--only` the rows of all others stay. Metrics are compared on the 150 batches of `peer_metrics`: a row has
the values of the batch on which they differ most. Weights are compared on one batch of 64 responses with a mismatch of
0.3 nats. There `theirs` and `ours` are the means over tokens, and `difference` is the largest of a token's, relative
where the weight exceeds 1. Where a framework gives only a loss, `theirs` is its loss at an unchanged policy, `ours` is
−(1/T) Σ w_t A_t. It fails where a relative difference exceeds 1e-6.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from framework_calls import WEIGHTS, Batch, make_batch
from peer_metrics import BATCHES, OF_A_LOG, metric_rows
from peer_sources import PeerError, folder_of, peers
from table import write_csv
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.diagnosis.replay import catalogue, configuration
from tailrl.objective.corrections import correct, normaliser

METRICS = (*OF_A_LOG, "TRL")
FRAMEWORKS = sorted({*METRICS, *WEIGHTS})

MOST = 1e-6
"""The largest relative difference."""

Row = dict[str, Any]


def compare(framework: str, folder: Path, batches: int = BATCHES) -> Iterator[Row]:
    """The rows of a framework, whose source is in the folder."""
    peer = peers()[framework.lower()]
    about = {"framework": framework, "version": peer.version or peer.commit[:7], "date": peer.date}
    if framework in METRICS:
        for row in metric_rows(framework, folder, batches):
            numbers = line(row["source"], row["quantity"], row["theirs"], row["ours"], row["difference"])
            yield about | numbers | {"batches": row["batches"], "batch": row["batch"]}
    if framework in WEIGHTS:
        for numbers in compare_weights(framework, folder, make_batch()):
            yield about | numbers | {"batches": 1, "batch": ""}


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
    size = 1.0 if row["batch"] != "" else max(1.0, abs(float(row["theirs"])))  # a metric's difference is relative
    return not float(row["difference"]) <= MOST * size


def main() -> None:
    """Compares, writes the table and fails at a difference, or where a framework cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="frameworks to execute")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    arguments = parser.parse_args()
    kept = list(csv.DictReader(arguments.out.open(encoding="utf-8"))) if arguments.out.exists() else []
    rows: list[Row] = [row for row in kept if row["framework"] not in arguments.only]
    faults: list[str] = []
    for framework in arguments.only:
        try:
            rows += compare(framework, folder_of(peers()[framework.lower()]))
        except PeerError as error:
            faults.append(f"{framework} is not executed: {error}")
            rows += [row for row in kept if row["framework"] == framework]
    write_csv(sorted(rows, key=lambda row: str(row["framework"])), arguments.out)
    faults += [f"differs: {row}" for row in rows if wrong(row)]
    print(f"{len(rows)} numbers compared, the largest difference {max(float(row['difference']) for row in rows):.2g}")
    print("\n".join(faults))
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
