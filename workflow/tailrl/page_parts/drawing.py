"""Charts of pages: matplotlib draws them, and the page gives their marks names, values and its own colours.

A figure is 360 points wide, as a phone is, and its text is text. In the page it scales, follows light and dark, and has
a title for each mark that is named.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tailrl.page_parts import TEMPLATES
from tailrl.page_parts.scales import LINEAR_PART, magnitudes, tick_label
from tailrl.runtime.templates import renderer

render = renderer(TEMPLATES)

WIDTH = 360 / 72  # inches
HEIGHT = 260 / 72

ARM_COLOURS = ("#024CAB", "#C4311F", "#00A65A", "#000000", "#CC79A7", "#DF7808", "#7C8AFF")
"""Found by a search: apart for any colour vision, and dark enough for a line on white. page.css has them as --arm-0 and
so on, and others of a dark page. A test holds both."""

INK, SOFT, GRID, PAGE = "#1d2328", "#5b6670", "#dfe4e8", "#fefefe"
MARK, LAW = ARM_COLOURS[:2]
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--line", PAGE: "--page"}
VARIABLES |= {colour.lower(): f"--arm-{number}" for number, colour in enumerate(ARM_COLOURS)}
"""Colours as they are drawn, and the variables of page.css that take their place."""

PAPER = {"#ffffff": "--page", "#e4e4e4": "--line", "#6e6e6e": "--soft"}
PAPER |= {colour.lower(): f"--arm-{number}" for number, colour in enumerate(ARM_COLOURS)}
"""The same of figures for paper, whose ink is black, an arm's colour too."""

Marks = dict[str, dict[str, str]]
"""Attributes of a mark's element by the gid of its artist; `title` is what the mark says."""

LEFT_OUT = re.compile(
    r'\s*(<metadata>.*?<.metadata>|<defs>\s*<style.*?<.style>\s*<.defs>|<!--.*?-->|<g id="[^"]*"/>)'
    r'|font-family: [^;"]*; ?| transform="rotate\(-?0 [^)]*\)"',
    re.DOTALL,
)
"""What the page has itself, or needs not: fonts, styles of the whole document, empty groups, turns by nothing."""

DIGITS = re.compile(r"(\d\.\d\d)\d+")
"""Places are written in hundredths of a point."""

_STYLE: dict[Any, Any] = {
    "font.size": 12.5,
    "axes.labelsize": 12.5,
    "xtick.labelsize": 12.5,
    "ytick.labelsize": 12.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": False,
    "grid.color": GRID,
    "grid.linewidth": 1,
    "lines.linewidth": 1.8,
    "lines.solid_joinstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "tailrl",
    "text.parse_math": False,
}


@contextmanager
def chart(across: str = "", height: float = HEIGHT) -> Iterator[tuple[Figure, Axes]]:
    """A figure for a page and its plane, in the pages' look."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=72, layout="constrained")
        plane = figure.subplots()
        plane.set_xlabel(across)
        yield figure, plane


def in_page(figure: Figure, name: str, label: str, marks: Marks | Callable[[], Marks], kind: str = "") -> Markup:
    """The figure as an <svg> element of a page.

    Args:
        figure: made within `chart`; the artists that are marks have a gid.
        name: begins the ids of the element, since a page's ids must be unique.
        label: what the figure shows, for those who do not see it; empty for an ornament.
        marks: of the artists that are marks, or a function that gives them once the figure has its layout.
        kind: one more class of the element, whose id is <name>-drawing.
    """
    file = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = LEFT_OUT.sub("", svg[svg.index("<svg") :])
    svg = DIGITS.sub(r"\1", svg.replace("xlink:href", "href"))
    marks = marks() if callable(marks) else marks
    svg = re.sub(r'<g id="([^"]*)">', lambda found: _group(found[1], marks), svg)
    svg = re.sub(r'\b(id="|href="#|url\(#)', lambda begin: f"{begin[1]}{name}-", svg)
    svg = in_scheme(svg, VARIABLES)
    view = re.search(r'viewBox="([^"]*)"', svg)
    attributes = {
        "id": f"{name}-drawing",
        "class": f"drawing {kind}".rstrip(),
        "viewBox": view[1] if view else None,
        "role": "img" if label else None,
        "aria-label": label or None,
        "aria-hidden": None if label else "true",
    }
    return Markup(render("drawing.html.j2", attributes=attributes, body=Markup(svg[svg.index(">") + 1 :].strip())))


def _group(gid: str, marks: Marks) -> str:
    """The start of a group; matplotlib's own ids, which nothing refers to, go."""
    attributes = dict(marks.get(gid, {}))
    return render("mark.html.j2", title=attributes.pop("title", ""), attributes=attributes).strip()


def in_scheme(svg: str, variables: Mapping[str, str]) -> str:
    """The drawing with variables of page.css in place of these colours, so that it follows light and dark."""

    def variable(found: re.Match[str]) -> str:
        return f"var({variables[found[0]]})" if found[0] in variables else found[0]

    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", variable, svg)


def set_magnitudes(axis: Axis, values: list[float]) -> bool:
    """`set_scale`, with all digits on a linear axis."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    return set_scale(axis, values, tick_label)


def set_scale(axis: Axis, values: Iterable[float], label: Callable[[float], str]) -> bool:
    """Give an axis the scale of `magnitudes`, with labels of powers; False, and a linear axis, where that is linear."""
    scale = magnitudes(values)
    if scale is None:
        return False
    name = "x" if axis.axis_name == "x" else "y"  # type: ignore[attr-defined]
    set_kind = axis.axes.set_xscale if name == "x" else axis.axes.set_yscale
    if scale.threshold is None:
        set_kind("log")
    else:
        set_kind("symlog", linthresh=scale.threshold, linscale=LINEAR_PART)
    # The margins of the linear axis would be decades on this one.
    axis.axes.autoscale_view(scalex=name == "x", scaley=name == "y")
    axis.set_major_locator(FixedLocator(scale.ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if scale.plain else label(value)))
    axis.set_minor_locator(NullLocator())
    return True
