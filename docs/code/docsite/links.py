"""Links and anchors of Markdown text, as code hosts read it."""

import re
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^([ >]*)(`{3,}|~{3,})[^\n]*\n.*?(?:^[ >]*\2[`~]*[ ]*$|\Z)", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n[ ]*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(
    r"\]\(\s*<?(?P<inline>[^()\s<>]+(?:\([^()\s]*\)[^()\s<>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)"
    r"|^[ ]{0,3}\[[^\]\n]+\]:[ ]+(?P<reference>\S+)"
    r"|<(?:a|img|source|object)\b[^>]*?\b(?:href|src|srcset|data)=\"(?P<html>[^\"]+)\"",
    re.MULTILINE,
)
HEADING = re.compile(r"^#{1,6}[ ]+(.+?)[ #]*$", re.MULTILINE)
NAMED = re.compile(r"<[a-z]+\b[^>]*?\b(?:id|name)=\"([^\"]+)\"")


def without(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with what fits the patterns blanked out; every other character keeps its place."""
    for pattern in patterns:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return text


def links(text: str) -> Iterator[tuple[int, int, str]]:
    """Each link outside code and comments: where its target begins and ends, and the target."""
    for found in LINK.finditer(without(text, FENCE, CODE_SPAN, COMMENT)):
        kind = found.lastgroup or ""
        yield found.start(kind), found.end(kind), found[kind]


def replaced(text: str, change: Callable[[str], str]) -> str:
    """The text with each link's target changed."""
    parts, end = [], 0
    for start, stop, target in links(text):
        parts += [text[end:start], change(target)]
        end = stop
    return "".join([*parts, text[end:]])


def is_elsewhere(target: str) -> bool:
    """Whether the target names a host or a scheme, such as https: or mailto:."""
    return re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE) is not None


def slug(heading: str) -> str:
    """The anchor that a code host gives to a heading."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    words = re.sub(r"<[^>]+>", "", words)
    return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings' and its explicit ones."""
    found: set[str] = set(NAMED.findall(without(text, FENCE, CODE_SPAN)))
    for heading in HEADING.findall(without(text, FENCE)):
        plain, again = slug(heading), 0
        while (anchor := f"{plain}-{again}" if again else plain) in found:
            again += 1
        found.add(anchor)
    return found
