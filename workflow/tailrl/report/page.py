"""The summary as one HTML page with its figures inside: no network, no second file."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
figure { margin: 2rem 0; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: 0.9rem; color: #555; }
"""


def page(summary: str, figures: Sequence[tuple[Path, str]]) -> str:
    """HTML of a summary in Markdown, followed by SVG figures, each with its caption (plain text)."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(summary)
    drawn = "".join(
        f"<figure>{_inline(path)}<figcaption>{html.escape(caption)}</figcaption></figure>" for path, caption in figures
    )
    title = html.escape(summary.partition("\n")[0].lstrip("# "))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{body}{drawn}</body></html>\n"
    )


def _inline(path: Path) -> str:
    """The figure's <svg> element; its ids get the file's name, for ids must differ within a page."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{path.stem}-", svg)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1) if "viewBox" in svg else svg
