"""The list of docs/decisions/README.md, from the pages' titles.

`make pages` writes it into the page.
"""

from pathlib import Path

from blocks import filled

FOLDER = Path(__file__).parents[1] / "decisions"
PAGE = FOLDER / "README.md"


def listed() -> str:
    """A line for each decision, by its number."""
    pages = sorted(FOLDER.glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").splitlines()[0].partition(": ")[2] for page in pages]
    return "\n".join(f"{int(page.name[:4])}. [{title}]({page.name})" for title, page in zip(titles, pages, strict=True))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE, {"titles": listed()}), encoding="utf-8")
