"""Blocks of pages that code writes."""

from pathlib import Path

import pytest

from blocks import filled
from pages import BLOCKS, text
from tailrl.runtime.errors import StudyError

BLOCK = "<!-- made from one -->\n\nold\n\n<!-- end of one -->\n"


def test_a_block_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"before\n\n{BLOCK}\nafter\n", encoding="utf-8")
    found = filled(tmp_path / "page.md", {"one": r"new \1"})
    assert found == f"before\n\n{BLOCK}\nafter\n".replace("old", r"new \1")


@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.name)
def test_a_page_has_the_blocks_that_are_made_now(page: Path) -> None:
    """`make pages` writes them."""
    assert page.read_text(encoding="utf-8") == text(page)


@pytest.mark.parametrize("count", [0, 2])
def test_each_block_is_there_once(tmp_path: Path, count: int) -> None:
    (tmp_path / "page.md").write_text(BLOCK * count, encoding="utf-8")
    with pytest.raises(StudyError, match=f"page.md has {count} blocks between <!-- made from one -->"):
        filled(tmp_path / "page.md", {"one": "new"})
