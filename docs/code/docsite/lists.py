"""Lists as code hosts read them: what is within an item begins below its text, not four columns further in."""

import re

MARKER = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ ]+(?=\S)")
FENCE = re.compile(r"`{3,}|~{3,}")
STEP = 4
"""The columns by which Python-Markdown wants what is within an item indented."""


def indented(text: str) -> str:
    """The Markdown with what is within list items indented by four columns a level."""
    lines: list[str] = []
    starts: list[int] = []  # for each open item, the column where its text begins
    fence, moved, loose = "", 0, False
    for line in text.split("\n"):
        stripped = line.lstrip(" ")
        column = len(line) - len(stripped)
        if fence:
            lines.append(" " * moved + line if moved > 0 else line)
            fence = "" if stripped.startswith(fence) and not stripped.strip(fence[0]).strip() else fence
            continue
        if stripped:
            while starts and column < starts[-1]:
                starts.pop()
            moved = STEP * len(starts) - starts[-1] if starts else 0
            if opened := FENCE.match(stripped):
                fence = opened[0]
            elif found := MARKER.match(stripped):
                if loose and lines[-1]:
                    lines.append("")  # else it would be a line of the paragraph above
                loose = False
                starts.append(column + len(found[0]))
        else:
            loose = bool(starts)
        lines.append(" " * moved + line if stripped and moved > 0 else line)
    return "\n".join(lines)
