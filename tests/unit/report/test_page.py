"""The HTML page: whole in one file, tables rendered, no id twice."""

import re
from pathlib import Path

from tailrl.report.page import Drawing, figure, page

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
    assert 'id="7b-one-a"' in figure(Drawing(write(tmp_path, "one"), ""), "7b-")


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
