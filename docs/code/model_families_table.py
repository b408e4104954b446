"""The table of families in docs/how-to/your-data.md, from docs/results/families.csv, which `make families` measures."""

import csv
from pathlib import Path

from blocks import filled

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/your-data.md"
MEASURED = ROOT / "docs/results/families.csv"


def table() -> str:
    """A line for each family that trains, then one for each that is refused."""
    with MEASURED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    versions = [name for name in rows[0] if name.startswith("logits, ")]
    head = [
        "family",
        "vLLM serves it by",
        "k3, nats",
        "largest \\|Δ\\|",
        *(name.partition("-")[2] for name in versions),
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        if row["verdict"] == "measured":
            k3 = max((row["k3, trainer first"], row["k3, engine first"]), key=float)
            read = [row[name].partition(":")[0] for name in versions]
            lines.append([f"`{row['family']}`", f"`{row['served_by']}`", k3, row["largest"], *read])
    refused = [f"- `{row['family']}`: {row['verdict']}." for row in rows if row["verdict"] != "measured"]
    return "\n".join(
        [*(f"| {' | '.join(cells)} |" for cells in lines), "", "Refused, with the sentence:", "", *refused]
    )


def page() -> str:
    """The page with its table as it was measured; without one before the first measurement."""
    return filled(PAGE, {"families.csv": table() if MEASURED.is_file() else "`make families` was not run yet."})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
