"""Blocks of a page that code writes. Each stands between two marks, which name what it is made from."""

import re
from collections.abc import Mapping
from pathlib import Path

from tailrl.artifacts.files import read_text
from tailrl.runtime.errors import StudyError


def filled(page: Path, blocks: Mapping[str, str]) -> str:
    """The page's text with its blocks, by name, holding these texts; StudyError where it does not have each once."""
    text = read_text(page)
    for name, block in blocks.items():
        begin, end = f"<!-- made from {name} -->", f"<!-- end of {name} -->"
        kept = re.split(rf"(?s)(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", text)
        if len(kept) != 2:
            raise StudyError(f"{page.name} has {len(kept) - 1} blocks between {begin} and {end}, each on a line")
        text = f"\n{block}\n\n".join(kept)
    return text
