"""llms.txt: the site's pages for a program that reads them, each as Markdown (https://llmstxt.org)."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

INLINE_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
Entry = tuple[str, str, str]
"""A page's title, its place in the site as Markdown, and what it says first."""


def sections(pages: Iterable[Any]) -> list[tuple[str, list[Entry]]]:
    """The pages of the navigation by the section on top of it, in its order; pages of no section come first."""
    found: dict[str, list[Entry]] = {}
    for page in pages:
        top = page.ancestors[-1].title if page.ancestors else "Start"
        found.setdefault(top, []).append((page.title, page.file.src_uri, opening(page.markdown)))
    return list(found.items())


def opening(markdown: str) -> str:
    """The first paragraph of a page, on one line, without links and emphasis."""
    paragraphs = (part.strip() for part in markdown.split("\n\n"))
    first = next((part for part in paragraphs if part and part[0] not in "#!|<`-{"), "")
    return INLINE_LINK.sub(r"\1", " ".join(first.split())).replace("*", "")


def llms_text(name: str, description: str, nav: Sequence[tuple[str, Sequence[Entry]]]) -> str:
    """The text of llms.txt."""
    lines = [f"# {name}", "", f"> {description}", ""]
    for section, entries in nav:
        lines += [f"## {section}", "", *(f"- [{title}]({place}): {first}" for title, place, first in entries), ""]
    return "\n".join(lines)
