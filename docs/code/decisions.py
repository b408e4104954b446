"""The list of docs/decisions/README.md, from the pages' titles.

`make pages` writes it into the page.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "decisions"
PAGE = FOLDER / "README.md"
BLOCK = re.compile(r"(?<=<!-- made from titles -->\n\n).*?(?=\n\n<!-- end of titles -->)", re.DOTALL)


def listed() -> str:
    """A line for each decision, by its number."""
    pages = sorted(FOLDER.glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").splitlines()[0].partition(": ")[2] for page in pages]
    return "\n".join(f"{int(page.name[:4])}. [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: listed(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
