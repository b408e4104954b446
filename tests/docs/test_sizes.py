"""The tables of docs/how-to/gpu.md are made by the plan."""

import sizes


def test_the_page_has_the_tables_that_the_plan_makes() -> None:
    """`make pages` writes them."""
    text = sizes.PAGE.read_text(encoding="utf-8")
    assert text == sizes.page()
    for made in (sizes.studies(), sizes.sizes()):
        assert made in text
