"""llms.txt: the navigation's pages with their first words, as links to Markdown."""

from types import SimpleNamespace

from docsite.llms import llms_text, opening, sections


def page(title: str, place: str, markdown: str, section: str = "") -> SimpleNamespace:
    ancestors = [SimpleNamespace(title="inner"), SimpleNamespace(title=section)] if section else []
    return SimpleNamespace(title=title, file=SimpleNamespace(src_uri=place), markdown=markdown, ancestors=ancestors)


def test_the_first_paragraph_is_told_without_headings_tables_links_and_emphasis() -> None:
    text = "# Title\n\n![a picture](a.svg)\n\n| a | b |\n\n*k3* is the [size](b.md#c) of\nthe **mismatch**.\n\nMore."
    assert opening(text) == "k3 is the size of the mismatch."
    assert opening("# Title\n\n- a list alone\n") == ""


def test_pages_stand_under_the_section_on_top_in_the_navigations_order() -> None:
    pages = [
        page("Home", "index.md", "# Home\n\nWelcome."),
        page("MIS", "concepts/mis.md", "# MIS\n\nWeights.", "Concepts"),
        page("DVP", "concepts/dvp.md", "# DVP\n\nPruning.", "Concepts"),
    ]
    text = llms_text("tailrl", "what it is", sections(pages))
    assert text.startswith("# tailrl\n\n> what it is\n\n## Start\n\n- [Home](index.md): Welcome.\n\n## Concepts\n\n")
    assert text.index("- [MIS](concepts/mis.md): Weights.") < text.index("- [DVP](concepts/dvp.md): Pruning.")
