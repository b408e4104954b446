"""Writes the table "My k3 is X" of README.md and docs/index.md from my_k3.yaml.

PYTHONPATH=docs/code python -m my_k3
"""

from pathlib import Path

import yaml

from blocks import filled
from docsite.markdown import table

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).with_name("my_k3.yaml")
PAGES = {ROOT / "README.md": "docs/", ROOT / "docs/index.md": ""}
"""The pages that have the table, and what leads from each to docs/. The README leaves out what others publish."""

HEADS = {
    "k3": "your k3",
    "cause": "usual cause",
    "seen": "seen here",
    "others": "others call normal",
    "do": "do",
}


def rows_table(up: str) -> str:
    """The table, its links led from a page to docs/ by `up`."""
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    keys = [key for key in HEADS if not (up and key == "others")]
    return table((HEADS[key] for key in keys), ([row[key].replace("](", f"]({up}") for key in keys] for row in rows))


def text(page: Path) -> str:
    """The page with its table made anew."""
    return filled(page, {"my_k3.yaml": rows_table(PAGES[page]).rstrip()})


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(text(page), encoding="utf-8")
