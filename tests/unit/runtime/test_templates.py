"""Templates: values are escaped in HTML and bring nothing that is loaded in Markdown; tables; text that is wrapped."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from tailrl.runtime.templates import flow, header, renderer, row


def render(folder: Path, name: str, text: str, **values: object) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return renderer(folder, len)(name, **values)


def test_html_is_escaped_and_markdown_is_as_it_stands(tmp_path: Path) -> None:
    value = "a < b & '**c**' <b>"
    escaped = "a &lt; b &amp; &#39;**c**&#39; &lt;b&gt;"
    assert render(tmp_path, "a.html.j2", "<p>{{ value }}</p>", value=value) == f"<p>{escaped}</p>"
    assert render(tmp_path, "a.md.j2", "<p>{{ value }}</p>\n", value=value) == "<p>a < b & '**c**' &lt;b></p>\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("<script>x</script>", "&lt;script>x&lt;/script>"),
        ("<!-- x --> <?x?> <https://a.b>", "&lt;!-- x --> &lt;?x?> &lt;https://a.b>"),
        ("![a](http://b/c.png) [d](e)", "!\\[a](http://b/c.png) [d](e)"),
        ("p < 0.001, x<2, <= 3", "p < 0.001, x<2, <= 3"),
        (3, "3"),
        ('<a id="dvp.prop4_2"></a> <a id="x" href="y"></a>', '<a id="dvp.prop4_2"></a> &lt;a id="x" href="y">&lt;/a>'),
    ],
)
def test_a_value_in_markdown_brings_no_html_and_no_image(tmp_path: Path, value: object, text: str) -> None:
    assert render(tmp_path, "a.md.j2", "{{ value }}", value=value) == text
    assert row(value) == f"| {text} |"
    assert render(tmp_path, "a.md.j2", "{{ row(value) }}", value=value) == f"| {text} |", "once and not twice"


def test_a_table(tmp_path: Path) -> None:
    assert header("a|b", "c") == "| a\\|b | c |\n| --- | --- |"
    assert row("a|b\nc", 1.5, "") == "| a\\|b c | 1.5 |  |"
    text = "{{ header('a') }}\n{% for b in c %}\n{{ row(b, len(b)) }}\n{% endfor %}\nend\n"
    assert render(tmp_path, "a.md.j2", text, c=["x", "yz"]) == "| a |\n| --- |\n| x | 1 |\n| yz | 2 |\nend\n"


def test_a_paragraph_may_be_wrapped(tmp_path: Path) -> None:
    assert flow("\n  a  b\n  c\n") == "a  b c\n"
    text = "{% filter flow %}\na\n{% if b %}\nb\n{% endif %}\nc\n{% endfilter %}\n\nd\n"
    assert [render(tmp_path, "a.md.j2", text, b=b) for b in (True, False)] == ["a b c\n\nd\n", "a c\n\nd\n"]


def test_a_name_that_is_not_given_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="'value' is undefined"):
        render(tmp_path, "a.md.j2", "{{ value }}")
