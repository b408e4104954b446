"""The HTML page: whole in one file, tables rendered, no id twice."""

import re
from pathlib import Path

from tailrl.page_parts.drawing import PAPER
from tailrl.reports.page import Drawing, inline, page

ROOT = Path(__file__).parents[3]

SVG = (
    '<?xml version="1.0"?><!DOCTYPE svg><svg width="10pt" height="5pt" viewBox="0 0 10 5">'
    '<path id="a"/><use xlink:href="#a"/><g clip-path="url(#a)"/></svg>'
)


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name}.svg"
    path.write_text(SVG, encoding="utf-8")
    return path


def test_tables_and_figures_are_in_the_page(tmp_path: Path) -> None:
    html = page(
        "# title\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n",
        [Drawing(write(tmp_path, "one"), "caption < one", ("tables/one.csv", "tables/two.csv"))],
    )
    assert "<title>title</title>" in html
    assert "<td>1</td>" in html
    assert "caption &lt; one" in html
    assert 'The numbers (CSV): <a href="tables/one.csv">one</a>, <a href="tables/two.csv">two</a>.' in html
    assert html.count("<svg") == 1 and "<?xml" not in html and "DOCTYPE svg" not in html


def test_ids_of_two_figures_do_not_meet(tmp_path: Path) -> None:
    html = page("# t", [Drawing(write(tmp_path, name), "") for name in ("one", "two")])
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert ids == ["figure-one", "one-a", "figure-two", "two-a"]
    assert {*re.findall(r'href="#([^"]+)"', html), *re.findall(r"url\(#([^)]+)\)", html)} == {"one-a", "two-a"}


def test_a_study_may_be_named_by_a_number(tmp_path: Path) -> None:
    assert 'id="7b-one-a"' in inline(write(tmp_path, "one"), "7b-one")


def test_a_figure_scales_with_the_page(tmp_path: Path) -> None:
    svg = re.search(r"<svg[^>]*>", page("# t", [Drawing(write(tmp_path, "one"), "")]))
    assert svg and 'width="10pt"' not in svg[0] and 'viewBox="0 0 10 5"' in svg[0]


def test_figures_stand_in_the_section_that_they_belong_to(tmp_path: Path) -> None:
    drawn = [Drawing(write(tmp_path, name), "") for name in ("evaluation", "training", "time")]
    html = page("# t\n\n## Claims\n\na\n\n## Held-out score\n\nb\n\n## Training\n\nc\n\n## What ran\n\nd\n", drawn)
    order = [
        "Claims</h2>",
        "score</h2>",
        "figure-evaluation",
        "Training</h2>",
        "figure-training",
        "figure-time",
        "ran</h2>",
    ]
    assert sorted(order, key=html.index) == order
    assert '<a href="#held-out-score">' in html and 'id="held-out-score"' in html


def test_verdicts_are_chips() -> None:
    html = page("# t\n\n## Claims\n\n| a |\n| --- |\n| **contradicted** |\n", [])
    assert '<span class="chip bad">contradicted</span>' in html


def test_html_in_the_summary_is_text() -> None:
    assert "<script>" not in page("# t\n\nan arm called <script>alert(1)</script>\n", [])


def test_nothing_in_a_page_is_fetched(tmp_path: Path) -> None:
    """A description may hold an image or a link: the image is a link, and what runs is no link."""
    text = "# t\n\n![x](http://a/b.png) [y](javascript:alert(1)) <img src=http://a> [z](c.md)\n"
    html = page(text, [Drawing(write(tmp_path, "one"), "![x](http://a)")])
    assert "<img" not in html
    assert re.findall(r'<a href="([^"]*)"', html) == ["http://a/b.png", "c.md"]


def test_a_name_cannot_leave_its_place(tmp_path: Path) -> None:
    """Folders name studies."""
    assert 'id="&#34; onload=&#34;-a"' in inline(write(tmp_path, "one"), '" onload="')


def test_published_figures_are_taken_as_they_are() -> None:
    figures = sorted((ROOT / "docs/figures").glob("*.svg"))
    assert len(figures) > 20
    for path in figures:
        text = path.read_text(encoding="utf-8")
        whole = re.sub(' width="[^"]*" height="[^"]*"', "", text[text.index("<svg") :], count=1)
        taken = inline(path, "whose").replace("whose-", "")
        for colour, variable in PAPER.items():
            taken = taken.replace(f"var({variable})", colour)
        assert taken == whole
