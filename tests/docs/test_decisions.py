"""The list of decisions is complete, and each page has its parts."""

import re

from pages_fixture import DOCS

import decisions
from blocks import filled

FOLDER = DOCS / "decisions"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
FORM = re.compile(
    r"# (\d{4}): (.+)\n\n\d{4}-\d\d-\d\d\n\n(?s:.+)\n\n\*\*Decision\.\*\* (?s:.+)\n\n\*\*Consequences\.\*\* "
)


def test_each_page_has_its_number_date_and_parts() -> None:
    found = [FORM.match(page.read_text(encoding="utf-8")) for page in PAGES]
    assert [page.name for page, form in zip(PAGES, found, strict=True) if form is None] == []
    assert [form[1] for form in found if form] == [page.name[:4] for page in PAGES]


def test_the_list_is_that_of_the_pages() -> None:
    """Where it fails: `make pages`. The numbers are the decisions', without a gap."""
    assert filled(decisions.PAGE, {"titles": decisions.listed()}) == decisions.PAGE.read_text(encoding="utf-8")
    assert [int(page.name[:4]) for page in PAGES] == list(range(1, len(PAGES) + 1))
