"""What every benchmark does with its rows: print them as a Markdown table and, where asked, write them as CSV."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def ratios(column: str, times: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Over the rounds, of the ratio within a round: the median as `column`, and the ends of its range beside it."""
    found = [time / other for time, other in zip(times, base, strict=True)]
    ends = {"": statistics.median(found), "_min": min(found), "_max": max(found)}
    return {f"{column}{end}": round(ratio, 3) for end, ratio in ends.items()}


def show(rows: Sequence[Mapping[str, object]], out: Path | None) -> None:
    """Print the rows, which have the same columns; `out` is the CSV file, None for none."""
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if out:
        write_csv(rows, out)


def write_csv(rows: Sequence[Mapping[str, object]], out: Path) -> None:
    """Write rows, which have the same columns."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
