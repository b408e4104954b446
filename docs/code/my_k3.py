"""The table "My k3 is X" of README.md and docs/index.md, from my_k3.yaml."""

from pathlib import Path

import yaml

from docsite.markdown import table

ROWS = Path(__file__).with_name("my_k3.yaml")

HEADS = {
    "k3": "your k3",
    "cause": "usual cause",
    "seen": "seen here",
    "others": "others call normal",
    "do": "do",
}


def rows_table(up: str) -> str:
    """The table, its links led from a page to docs/ by `up`; the README's leaves out what others publish."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    keys = [key for key in HEADS if not (up and key == "others")]
    return table(
        (HEADS[key] for key in keys), ([row[key].replace("](", f"]({up}") for key in keys] for row in rows)
    ).rstrip()
