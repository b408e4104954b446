"""The list of families in docs/how-to/your-data.md, from docs/results/families.csv, which `make families` measures."""

import csv
from pathlib import Path

MEASURED = Path(__file__).parents[1] / "results/families.csv"


def families() -> str:
    """The families that train, with their largest mismatch, and those that are refused."""
    with MEASURED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    trained = [row for row in rows if row["verdict"] == "measured"]
    k3 = max((row[f"k3, {order} first"] for row in trained for order in ("trainer", "engine")), key=float)
    largest = max((row["largest"] for row in trained), key=float)
    refused = [row for row in rows if row["verdict"] != "measured"]
    return (
        f"- Trained: {_names(trained)}. k3 is at most {k3} nats, |Δ| of a token at most {largest}.\n"
        f"- Refused: {_names(refused)}."
    )


def _names(rows: list[dict[str, str]]) -> str:
    return ", ".join(f"`{row['family']}`" for row in rows)
