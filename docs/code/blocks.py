"""Blocks of a page that code writes. Each stands between two marks, which name what it is made from."""

import re

from tailrl.runtime.errors import StudyError


def filled(page: str, name: str, text: str) -> str:
    """The page's text with this text in the block of this name; StudyError where it does not have one such block."""
    begin, end = f"<!-- made from {name} -->", f"<!-- end of {name} -->"
    found, count = re.subn(f"(?s)(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", lambda _: f"\n{text}\n\n", page)
    if count != 1:
        raise StudyError(f"the page has {count} blocks between {begin} and {end}, each on a line")
    return found
