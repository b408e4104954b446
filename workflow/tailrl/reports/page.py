"""Pages that need no network: their templates, and a study's summary with its figures as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it.token import Token
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from tailrl.artifacts.files import read_text
from tailrl.page_parts import TEMPLATES
from tailrl.page_parts.drawing import PAPER, in_scheme
from tailrl.page_parts.explorer import Response, explorer_data
from tailrl.page_parts.markdown import markdown_html, markdown_tokens
from tailrl.page_parts.number_text import count, p_value, percent, percent_of, points, short
from tailrl.reports.axes import save_svg
from tailrl.reports.figures import SECTION_OF
from tailrl.runtime.templates import renderer

if TYPE_CHECKING:
    from tailrl.reports.overview.screen import Screen

CHIPS = {
    "reproduced": "good",
    "a difference is shown": "good",
    "measured": "good",
    "contradicted": "bad",
    "not decided": "open",
}
"""The colours of verdicts; all others are grey."""


def colour(verdict: str) -> str:
    """The class of a verdict's chip."""
    return f"chip {CHIPS.get(verdict, 'none')}"


def inline(path: Path, name: str) -> Markup:
    """A figure's <svg> element for an HTML page, in the page's colours.

    The file is one that the report has drawn. Its ids start with `name`, since a page's ids must be unique.
    """
    text = read_text(path)
    svg = re.sub(r'\b(id="|href="#|url\(#)', lambda begin: f"{begin[1]}{escape(name)}-", text[text.index("<svg") :])
    return Markup(re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", in_scheme(svg, PAPER), count=1))


render = renderer(
    (Path(__file__).parent, TEMPLATES), colour, count, inline, p_value, percent, percent_of, points, short
)
"""A page of the report by its template's name and values."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: its SVG file, its caption, and the paths of its tables and of itself as files, relative to the page."""

    path: Path
    caption: str
    tables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page: its heading, its text and its figures."""

    name: str
    anchor: str
    body: Markup
    figures: list[Drawing] = field(default_factory=list)


def page(
    summary: str, figures: Sequence[Drawing], screen: "Screen | None" = None, responses: Sequence[Response] = ()
) -> str:
    """A study's summary in Markdown as a page, with each figure in the section that it belongs to.

    The charts of the first screen follow the list before the first heading. Its cards replace the section of claims.
    The token explorer of the responses is folded, at the end.
    """
    lead, about, *sections = _sections(summary)
    for drawing in figures:
        wanted = SECTION_OF.get(drawing.path.stem, "Training")
        last = sections[-1] if sections else about
        next((section for section in sections if section.name == wanted), last).figures.append(drawing)
    title = summary.partition("\n")[0].lstrip("# ")
    values = {"screen": screen, "lead": lead, "about": about, "sections": sections}
    return render("summary.html.j2", title=title, tokens=explorer_data(responses), **values)


def write_page(path: Path, words: str, figure: Figure, caption: str, tables: Sequence[str]) -> None:
    """Write a page in Markdown as path.md, its figure as path.svg, and both as path.html; tables are relative to it."""
    save_svg(figure, path.with_name(f"{path.name}.svg"))
    path.with_name(f"{path.name}.md").write_text(words, encoding="utf-8")
    drawing = Drawing(path.with_name(f"{path.name}.svg"), caption, tuple(tables))
    path.with_name(f"{path.name}.html").write_text(page(words, [drawing]), encoding="utf-8")


def _sections(markdown: str) -> list[Section]:
    """The page's sections, each with an id; the first two are the text before any heading, up to its list and after."""
    tokens = _tokens(markdown)
    begins = [i for i, token in enumerate(tokens) if (token.type, token.tag) == ("heading_open", "h2")]
    first = tokens[: begins[0] if begins else None]
    cut = next((i for i, token in enumerate(first, 1) if token.type == "bullet_list_close"), 0)
    found = [Section("", "", markdown_html(first[:cut])), Section("", "", markdown_html(first[cut:]))]
    for begin, end in zip(begins, [*begins, None][1:], strict=True):
        name = "".join(inner.content for inner in tokens[begin + 1].children or [])
        anchor = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        tokens[begin].attrSet("id", anchor)
        found.append(Section(name, anchor, markdown_html(tokens[begin:end])))
    return found


def _tokens(markdown: str) -> list[Token]:
    """The page's tokens; verdicts in tables are chips."""
    found = markdown_tokens(markdown)
    for before, token in pairwise(found):
        if before.type == "td_open":
            _colour(token.children or [])
    return found


def _colour(cell: Sequence[Token]) -> None:
    """Turn a verdict into a chip: bold text that is alone in its cell."""
    words = [token for token in cell if token.type != "text" or token.content]
    if [token.type for token in words] == ["strong_open", "text", "strong_close"]:
        strong, verdict, end = words
        strong.tag = end.tag = "span"
        strong.attrSet("class", colour(verdict.content))
