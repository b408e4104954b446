"""Blocks of pages that code writes."""

from pathlib import Path

import pytest

from blocks import filled
from tailrl.runtime.errors import StudyError

BLOCK = "<!-- made from one -->\n\nold\n\n<!-- end of one -->\n"


def test_a_block_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"before\n\n{BLOCK}\nafter\n", encoding="utf-8")
    found = filled(tmp_path / "page.md", {"one": r"new \1"})
    assert found == f"before\n\n{BLOCK}\nafter\n".replace("old", r"new \1")


@pytest.mark.parametrize("count", [0, 2])
def test_each_block_is_there_once(tmp_path: Path, count: int) -> None:
    (tmp_path / "page.md").write_text(BLOCK * count, encoding="utf-8")
    with pytest.raises(StudyError, match=f"page.md has {count} blocks between <!-- made from one -->"):
        filled(tmp_path / "page.md", {"one": "new"})
