"""Frameworks' own metrics beside ours on the same tokens. `peer_presets.py` has their losses and weights.

    PEERS=FOLDER python benchmarks/framework_metrics.py --out docs/results/framework_metrics.csv [--only NAME ...]

The frameworks come from `peer_sources`: wheels at the versions of `peers.yaml`, and checkouts in FOLDER of those on no
index. With `--only` the rows of all others stay. Metrics are compared on the 150 batches of `peer_metrics`, those of a
whole update on 50 of `peer_updates`; a row has the values of the batch on which they differ most. It fails where a
relative difference exceeds 1e-6.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_metrics import BATCHES, OF_A_LOG, metric_rows
from peer_sources import PeerError, folder_of, install_needs, peers
from table import write_csv

FRAMEWORKS = sorted((*OF_A_LOG, "TRL"))

MOST = 1e-6
"""The largest relative difference."""

Row = dict[str, Any]


def compare(framework: str, folder: Path, batches: int = BATCHES) -> Iterator[Row]:
    """The rows of a framework, whose source is in the folder."""
    peer = peers()[framework.lower()]
    about = {"framework": framework, "version": peer.version or peer.commit[:7], "date": peer.date}
    for row in metric_rows(framework, folder, batches):
        numbers = line(row["source"], row["quantity"], row["theirs"], row["ours"], row["difference"])
        yield about | numbers | {"batches": row["batches"], "batch": row["batch"]}


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
    return not float(row["difference"]) <= MOST


def main() -> None:
    """Compares, writes the table and fails at a difference, or where a framework cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="frameworks to execute")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    arguments = parser.parse_args()
    install_needs()
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
