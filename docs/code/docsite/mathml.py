"""Formulas: $...$ and $$...$$ become MathML when the site is built, so that a browser needs no script and no font."""

import logging
import re
from html import unescape
from xml.etree import ElementTree

from latex2mathml.converter import convert_to_element
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor

LOG = logging.getLogger("mkdocs.docsite.mathml")

FORMULA = r"(?<![\\$\w])(?:\$\$(?P<block>[^$]+?)\$\$|\$(?=[^\s$])(?P<inline>[^$\n]*?[^\s$\\])\$)(?![\w$])"
"""In a sentence no blank follows the first $ or precedes the last, so that two prices are no formula."""


def mathml(latex: str, display: str = "inline") -> str:
    """The formula as a MathML element, with its LaTeX as alternative text.

    Raises:
        ValueError: it is no LaTeX, or has a command that MathML would show by its name.
    """
    try:
        element = convert_to_element(latex, display=display)
    except Exception as error:  # the library has a class of its own for each fault
        raise ValueError(f"no formula: {latex!r}: {type(error).__name__} {error}") from error
    for part in element.iter():
        part.text = unescape(part.text or "")  # it has signs as &#x003C0; which would be escaped again
        if "\\" in part.text:
            raise ValueError(f"no formula: {latex!r}: {part.text} is no command that is known")
    element.set("alttext", latex)
    return ElementTree.tostring(element, encoding="unicode")


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: ARG002, N802
        latex = m["block"] or m["inline"]
        try:
            shown = mathml(latex.strip(), "block" if m["block"] else "inline")
        except ValueError as error:
            LOG.warning("%s", error)  # ends a strict build
            shown = latex
        return self.md.htmlStash.store(shown), m.start(0), m.end(0)


class Formulas(Extension):
    """The extension of Python-Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the pattern below code spans and above escapes, which would take a formula's backslashes."""
        md.inlinePatterns.register(_Formula(FORMULA, md), "formula", 185)
