r"""A strict reader of integer answers in `\boxed{}`: regular expressions and one brace count, no evaluation.

What it accepts is what a reader cannot take for anything but that integer. Every function takes hostile text
(unbalanced, nested or very long) in time linear in its length, and none of them raises.
"""

import re

MAX_DIGITS = 640
"""Longer numbers are no answer: Python's limit on reading integers can be set as low as this."""

_BOX = re.compile(r"\\boxed\s*\{")
# An escaped brace does not group; the brace after an escaped backslash does.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad)*"
# Thousands separators are safe: answers are compared with one integer, so that the other readings of 1,234
# (a list, a decimal comma) could only be wrong where they meet exactly that integer. Groups of three and one
# kind of separator all through are required.
_GROUPED = r"[1-9][0-9]{0,2}(?P<comma>,\\!|\{,\}|,|\\,)[0-9]{3}(?:(?P=comma)[0-9]{3})*"
_INTEGER = re.compile(rf"{_SPACE}(?:(?P<sign>[+\-−]){_SPACE})?(?P<number>[0-9]+|{_GROUPED}){_SPACE}")
_MATH_MODE = re.compile(rf"{_SPACE}\$([^$]*)\${_SPACE}")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None where there is none or where it is not closed."""
    start = None
    for box in _BOX.finditer(text):
        start = box.end()
    if start is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def integer(text: str) -> int | None:
    r"""The integer that the whole text writes, or None.

    Allowed around the digits: spaces (LaTeX's too), one sign, one pair of `$`. Leading zeros count for nothing:
    `070` is 70. Not allowed: decimals, units, words, equations, formulas, more than MAX_DIGITS digits.
    """
    inside = _MATH_MODE.fullmatch(text)
    match = _INTEGER.fullmatch(inside.group(1) if inside else text)
    if match is None:
        return None
    digits = re.sub(r"[^0-9]", "", match["number"]).lstrip("0") or "0"
    if len(digits) > MAX_DIGITS:
        return None
    return int(digits) if match["sign"] in (None, "+") else -int(digits)
