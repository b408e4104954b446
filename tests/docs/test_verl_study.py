"""The same arms by our own loop and by verl: the page has what was measured."""

import verl_study_table


def test_the_page_has_what_was_measured() -> None:
    """`make pages` writes it."""
    assert verl_study_table.PAGE.read_text(encoding="utf-8") == verl_study_table.page()
