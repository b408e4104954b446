"""Markdown of tables and docstrings."""

import re
from collections.abc import Iterable
from pathlib import Path

from docsite.links import CODE_SPAN

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\n((?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)
NAMES = {"Args": "Parameters"}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; cells are Markdown, in which a | is escaped."""
    heads = list(header)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|').strip() for cell in line)} |\n" for line in lines)


def filtered(text: str, name: str, rows: str, by: Iterable[str]) -> str:
    """A table in a box, above which docs/assets/filters.js puts filters.

    Args:
        text: the table.
        name: the box's class.
        rows: what the table lists, in the plural.
        by: the columns with a choice of their values.

    Raises:
        ValueError: the table has no such column.
    """
    heads = [cell.strip() for cell in text.partition("\n")[0].split("|")]
    columns = list(by)
    if lacking := [column for column in columns if column not in heads]:
        raise ValueError(f"the table of {rows} has no column {', '.join(lacking)}")
    box = f'<div class="{name}" data-rows="{rows}" data-filters="{",".join(columns)}" markdown="1">'
    return f"{box}\n\n{text}\n</div>\n"


def plain(text: str) -> str:
    """Text of a docstring with what Markdown would read as its own signs escaped; code spans stay."""
    parts, end = [], 0
    for found in CODE_SPAN.finditer(text):
        parts += [_escaped(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return re.sub(r"([\\*_\[\]$~])", r"\\\1", text).replace("<", "&lt;")


def first_sentence(text: str) -> str:
    """A docstring's first paragraph on one line."""
    return plain(" ".join(text.partition("\n\n")[0].split()))


def docstring(text: str) -> str:
    """A docstring as Markdown: its paragraphs, and a list for each section such as Args."""
    parts, end = [], 0
    for found in SECTION.finditer(text):
        parts += [_paragraphs(text[end : found.start()]), f"**{NAMES.get(found[1], found[1])}**\n\n{_items(found[2])}"]
        end = found.end()
    return "\n\n".join(part for part in [*parts, _paragraphs(text[end:])] if part)


def _paragraphs(text: str) -> str:
    """Paragraphs; an indented one is set as code, for it is a formula or an example."""
    found = []
    for paragraph in filter(None, (part.strip("\n") for part in re.split(r"\n\s*\n", text))):
        indented = all(line.startswith("    ") for line in paragraph.splitlines())
        found.append(f"```text\n{paragraph}\n```" if indented else plain(paragraph))
    return "\n\n".join(found)


def _items(text: str) -> str:
    """A section's entries: `name: what it is`, each of which may go on below, deeper indented."""
    lines = [line[4:] for line in text.strip("\n").splitlines()]
    joined: list[str] = []
    for line in lines:
        if line.startswith(" ") and joined:
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    found = []
    for entry in filter(None, joined):
        name, colon, rest = entry.partition(": ")
        named = colon and re.fullmatch(r"[\w., *]+", name)
        found.append(f"- `{name}`: {plain(rest)}" if named else f"- {plain(entry)}")
    return "\n".join(found)


def source_link(path: Path) -> str:
    """A link from a page of reference/ to a file of the repository."""
    return f"[`{path.as_posix()}`](../../{path.as_posix()})"
