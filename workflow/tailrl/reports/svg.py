"""SVG figures inside HTML pages: a file is accepted only if it holds a drawing and nothing else."""

import re
from pathlib import Path
from xml.parsers import expat

from markupsafe import Markup, escape

from tailrl.artifacts.files import read_text
from tailrl.page_parts.drawing import PAPER, in_scheme
from tailrl.runtime.errors import DataError, one_line, reason

ELEMENTS = {
    *("svg", "defs", "style", "g", "path", "use", "clipPath", "rect", "circle", "pattern"),
    *("metadata", "rdf:RDF", "cc:Work", "dc:type", "dc:format", "dc:date"),
}
"""The elements that matplotlib uses. None of them runs, loads or links to anything, or holds HTML."""

LOADS_NOTHING = re.compile(r"(matrix|rotate|scale|skew[XY]|translate)\(|url\(#")
"""The functions in attributes and styles that load nothing."""


def inline(path: Path, name: str) -> Markup:
    """The figure's <svg> element for an HTML page, in the page's colours.

    Its ids start with `name`, since a page's ids must be unique.

    Raises:
        StudyError: the file is no SVG, or holds more than a drawing: a script, an event handler, a link, or text that
            a browser parses differently from XML.
    """
    svg = re.sub(r'\b(id="|href="#|url\(#)', lambda begin: f"{begin[1]}{escape(name)}-", _drawing(path))
    svg = in_scheme(svg, PAPER)
    if "viewBox" in svg:
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    return Markup(svg)


def _drawing(path: Path) -> str:
    """The file from its outermost element on."""
    svg, begins = read_text(path).encode(), list[int]()

    def refuse(what: str) -> None:
        raise DataError(f"{path}: a figure in a page must be a drawing only; this one has {one_line(what)}")

    def start(element: str, attributes: dict[str, str]) -> None:
        begins.append(parser.CurrentByteIndex)
        if element not in ELEMENTS:
            refuse(f"a <{element}>")
        for name, value in attributes.items():
            links = name.lower().endswith("href") and not value.startswith("#")
            if links or name.lower().startswith("on") or _loads(value):
                refuse(f"{name}={value!r}")

    def text(words: str) -> None:
        if _loads(words):
            refuse(f"the text {words!r}")

    def comment(words: str) -> None:
        # A browser ends <!--> at once, XML does not.
        if "<" in words or ">" in words:
            refuse(f"the comment {words!r}")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.CharacterDataHandler, parser.CommentHandler = start, text, comment
    parser.ProcessingInstructionHandler = lambda name, _: refuse(f"an instruction {name!r}")
    parser.StartCdataSectionHandler = lambda: refuse("a CDATA section")
    parser.EntityDeclHandler = lambda name, *_: refuse(f"an entity {name!r}")
    try:
        parser.Parse(svg, True)
    except expat.ExpatError as error:
        raise DataError(f"{path}: not an SVG file: {reason(error)}") from None
    return svg[begins[0] :].decode()


def _loads(style: str) -> bool:
    """Whether an attribute or a style may fetch a file, or hide that it does."""
    return any(mark in LOADS_NOTHING.sub("", style) for mark in "(@\\")
