r"""A strict reader of integer answers in `\boxed{}`: regular expressions and one brace count, no evaluation.

It accepts only text that can mean no other integer. Every function takes hostile text (unbalanced, nested or very
long) in linear time, and none raises.
"""

import re

MAX_DIGITS = 640
"""Longer numbers are no answer. Python's limit on reading integers can be set as low as this."""

_BOX = re.compile(r"\\boxed\s*\{")
# An escaped brace does not group; the brace after an escaped backslash does.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad)*"
# Thousands separators are safe. 1,234 could also be a list or a decimal, but it scores only if the answer is exactly
# 1234. Groups of three and one kind of separator are required.
_GROUPED = r"[1-9][0-9]{0,2}(?P<comma>,\\!|\{,\}|,|\\,)[0-9]{3}(?:(?P=comma)[0-9]{3})*"
_INTEGER = re.compile(rf"{_SPACE}(?:(?P<sign>[+\-−]){_SPACE})?(?P<number>[0-9]+|{_GROUPED}){_SPACE}")
_MATH_MODE = re.compile(rf"{_SPACE}\$([^$]*)\${_SPACE}")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None if there is none or it is not closed."""
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

    Allowed around the digits: spaces (LaTeX's too), one sign, one pair of `$`. Leading zeros are ignored: `070` is 70.
    Not allowed: decimals, units, words, equations, formulas, more than MAX_DIGITS digits.
    """
    inside = _MATH_MODE.fullmatch(text)
    match = _INTEGER.fullmatch(inside.group(1) if inside else text)
    if match is None:
        return None
    digits = re.sub(r"[^0-9]", "", match["number"]).lstrip("0") or "0"
    if len(digits) > MAX_DIGITS:
        return None
    return int(digits) if match["sign"] in (None, "+") else -int(digits)
