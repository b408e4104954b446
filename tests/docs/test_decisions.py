"""The list of decisions is complete, and each page has its parts."""

import re

from pages_fixture import DOCS

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
    """The numbers of the list are the decisions', without a gap."""
    titles = [page.read_text(encoding="utf-8").splitlines()[0].partition(": ")[2] for page in PAGES]
    lines = [
        f"{place}. [{title}]({page.name})" for place, (title, page) in enumerate(zip(titles, PAGES, strict=True), 1)
    ]
    assert [int(page.name[:4]) for page in PAGES] == list(range(1, len(PAGES) + 1))
    listed = re.findall(r"^\d+\. .*$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == lines
