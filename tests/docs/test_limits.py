"""How long the documents may be: a visitor has two minutes."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES, WORDS, ALL_WORDS = 120, 900, 30_000
MADE = ("docs/results/", "docs/claims.md", "docs/findings/", "docs/performance.md")
"""Published results, and what code writes; templates count in their place."""

OUTSIDE = ("tests/", ".", "results/", "site/", "docs/code/accessibility/node_modules/")


LOOKUP = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
"""What a template looks up: a word of the page, however long its call is."""

BLOCK = re.compile(r"<!-- made from (.+?) -->.*?<!-- end of \1 -->", re.DOTALL)
"""What code writes into a page."""


def words(text: str) -> int:
    """The words of a document, without the signs of its tables and lists."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def documents() -> dict[str, int]:
    """The words of every document that people write, by its path."""
    paths = [path for pattern in ("*.md", "*.md.j2") for path in ROOT.rglob(pattern)]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    own = {name: path for name, path in named.items() if not name.startswith((*MADE, *OUTSIDE, "workflow/"))}
    return {name: words(BLOCK.sub("", LOOKUP.sub("x", path.read_text(encoding="utf-8")))) for name, path in own.items()}


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    assert words(text) <= WORDS


def test_all_documents_together_are_short() -> None:
    found = documents()
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md"} <= found.keys()
    longest = sorted(found.items(), key=lambda one: -one[1])[:8]
    assert sum(found.values()) <= ALL_WORDS, longest
