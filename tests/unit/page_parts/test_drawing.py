"""Figures in pages: marks say what they are, colours follow the page's scheme, and text stays text."""

import re
from pathlib import Path
from xml.etree import ElementTree

from tailrl.page_parts import drawing
from tailrl.page_parts.drawing import ARM_COLOURS, chart, in_page

HOSTILE = '"><script>alert(1)</script>'


def drawn(words: str = "", **marks: dict[str, str]) -> str:
    with chart(words or "across") as (figure, plane):
        for number, colour in enumerate(ARM_COLOURS):
            plane.plot([0, 1], [0, number], color=colour, gid=f"line{number}")
        plane.text(0, 0, words)
        return in_page(figure, "one", words or "a label", marks)


def test_a_mark_says_what_it_is() -> None:
    svg = drawn(line1={"class": "series", "data-name": "x & y", "title": "a < b"})
    ElementTree.fromstring(svg)
    (mark,) = re.findall(r"<g class[^>]*>.*?</g>", svg, re.DOTALL)
    assert mark.startswith('<g class="series" data-name="x &amp; y"><title>a &lt; b</title>')
    assert "var(--arm-1)" in mark and svg.count("<title>") == 1


def test_each_colour_is_a_variable_of_the_page() -> None:
    """And the stylesheet has each, on a light and on a dark page."""
    svg = drawn()
    assert not re.search("#[0-9a-fA-F]{6}", svg)
    assert set(re.findall(r"var\((--arm-\d)\)", svg)) == {f"--arm-{number}" for number in range(len(ARM_COLOURS))}
    css = (Path(drawing.__file__).parent / "templates/page.css").read_text(encoding="utf-8")
    for number, colour in enumerate(ARM_COLOURS):
        light, _dark = re.findall(rf"--arm-{number}: (#\w+);", css)
        assert light.upper() == colour
    for variable in drawing.VARIABLES.values():
        assert len(re.findall(rf"{variable}: #", css)) == 2, variable


def test_a_figure_for_paper_follows_the_scheme_too() -> None:
    drawing_of = '<path id="#000000" style="stroke: #024cab; fill: #000000"/><path style="fill: #332288"/>'
    assert drawing.in_scheme(drawing_of, drawing.PAPER) == (
        '<path id="#000000" style="stroke: var(--arm-0); fill: var(--arm-3)"/><path style="fill: #332288"/>'
    )


def test_text_stays_text() -> None:
    svg = drawn(HOSTILE, line0={"title": HOSTILE, "data-x": HOSTILE})
    ElementTree.fromstring(svg)
    assert "<script" not in svg and svg.count("&lt;script&gt;") == 5


def test_two_figures_share_no_id_and_equal_ones_are_equal_bytes() -> None:
    with chart() as (figure, plane):
        plane.plot([0, 1], [0, 1], "o")
        one, other = (str(in_page(figure, name, "x", {})) for name in ("one", "other"))
    ids = [set(re.findall(r'id="([^"]*)"', svg)) for svg in (one, other)]
    assert ids[0] and not ids[0] & ids[1]
    for svg, own in zip((one, other), ids, strict=True):
        assert {
            target for pair in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg) for target in pair if target
        } <= own
    assert one == other.replace('"other-', '"one-').replace("#other-", "#one-")


def test_values_over_decades_have_a_tick_at_each() -> None:
    with chart() as (figure, plane):
        plane.plot([1, 2, 3], [1e-5, 1e-3, 1.0])
        assert drawing.set_magnitudes(plane.yaxis, [1e-5, 1e-3, 1.0])
        assert not drawing.set_magnitudes(plane.xaxis, [1, 2, 3])
        svg = in_page(figure, "one", "x", {})
    labels = re.findall(r">([^<\s]+)</text>", svg)
    assert {"1", "2", "3", "1e-5", "1e-3", "1e0"} & set(labels) >= {"1e-5", "1e-3"}
