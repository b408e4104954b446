"""Markdown as a part of a page in HTML."""

from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
"""HTML stays text and an image becomes a link, so that a description cannot make a page fetch anything."""


def markdown_tokens(markdown: str) -> list[Token]:
    """The text's tokens. Tables scroll if the page is narrow."""
    found: list[Token] = []
    for token in MARKDOWN.parse(markdown):
        if token.type == "table_open":
            found.append(Token("wide_open", "div", 1, attrs={"class": "wide"}))
        found.append(token)
        if token.type == "table_close":
            found.append(Token("wide_close", "div", -1))
    return found


def prose(text: str) -> Markup:
    """A sentence with marks of Markdown, such as code, as HTML."""
    return Markup(MARKDOWN.renderInline(text))


def markdown_html(tokens: Sequence[Token]) -> Markup:
    """The tokens as HTML."""
    return Markup(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))
