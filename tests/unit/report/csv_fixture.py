"""Tables that a report wrote, as its tests read them."""

import csv
from pathlib import Path


def rows(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
