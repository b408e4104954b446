"""Pages of HTML that need no network: their look, figures drawn inside them, and a study's summary as such a page."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = Path(__file__).parents[2] / "report" / "page.css"

CHIPS = {
    "reproduced": "good",
    "a difference is shown": "good",
    "measured": "good",
    "contradicted": "bad",
    "not decided": "open",
}
"""The colour of a verdict; grey for what decides nothing."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: its SVG file, its caption, and where the tables behind it lie, as seen from the page."""

    path: Path
    caption: str
    tables: tuple[str, ...] = ()


SECTIONS = {"evaluation": "Held-out score", "survival": "Held-out score"}
"""The section of a summary that a figure belongs to; every other one belongs to `Training`."""


def page(summary: str, figures: Sequence[Drawing]) -> str:
    """A study's summary in Markdown with each figure in the section that it belongs to."""
    body = _markdown(summary)
    title = summary.partition("\n")[0].lstrip("# ")
    first, *sections = re.split(r"(?=<h2>)", body)
    names = [re.sub(r"</h2>.*", "", section.removeprefix("<h2>"), flags=re.DOTALL) for section in sections]
    placed: dict[int, str] = {}
    for drawing in figures:
        wanted = SECTIONS.get(drawing.path.stem, "Training")
        place = names.index(wanted) if wanted in names else len(names) - 1
        placed[place] = placed.get(place, "") + figure(drawing)
    parts = [
        section.replace("<h2>", f'<h2 id="{_anchor(name)}">', 1) + placed.get(index, "")
        for index, (name, section) in enumerate(zip(names, sections, strict=True))
    ]
    links = [(f"#{_anchor(name)}", html.unescape(name)) for name in names]
    rest = placed.get(-1, "")
    return document(title, _framed(first) + navigation(links) + _coloured(_framed("".join(parts))) + rest)


def document(title: str, body: str) -> str:
    """A whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body>{body}</body></html>\n"
    )


def navigation(links: Sequence[tuple[str, str]]) -> str:
    """Links to the parts of a page."""
    inner = "".join(f'<a href="{html.escape(target)}">{html.escape(words)}</a>' for target, words in links)
    return f"<nav>{inner}</nav>" if links else ""


def fragment(markdown: str) -> str:
    """A page in Markdown as a part of another page: without its title, its sections a size smaller."""
    _, _, rest = markdown.partition("\n")
    body = _markdown(rest).replace("<h2>", "<h4>").replace("</h2>", "</h4>")
    return _coloured(_framed(body))


def _markdown(text: str) -> str:
    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def figure(drawing: Drawing, prefix: str = "") -> str:
    """An SVG figure in the page, its caption and links to its numbers; `prefix` keeps ids of several studies apart."""
    links = [f'<a href="{html.escape(table)}">{html.escape(Path(table).stem)}</a>' for table in drawing.tables]
    numbers = f" The numbers (CSV): {', '.join(links)}." if links else ""
    name = f"{prefix}{drawing.path.stem}"
    drawn = f'<div role="img" aria-label="{html.escape(drawing.path.stem)}">{_inline(drawing.path, name)}</div>'
    return (
        f'<figure id="figure-{html.escape(name)}">{drawn}'
        f"<figcaption>{html.escape(drawing.caption)}{numbers}</figcaption></figure>"
    )


def chip(verdict: str) -> str:
    """A verdict in its colour."""
    return f'<span class="chip {CHIPS.get(verdict, "none")}">{html.escape(verdict)}</span>'


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", html.unescape(name).lower()).strip("-")


def _framed(body: str) -> str:
    """Tables that scroll by themselves where the page is narrow."""
    return body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def _coloured(body: str) -> str:
    """Verdicts of the table of claims as chips."""
    return re.sub(r"<td><strong>([a-z ]+)</strong></td>", lambda cell: f"<td>{chip(cell[1])}</td>", body)


def _inline(path: Path, name: str) -> str:
    """The figure's <svg> element; its ids get a name, for ids must differ within a page."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1) if "viewBox" in svg else svg
