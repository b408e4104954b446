"""Damage to bytes, text and JSON values, drawn from a seeded generator."""

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

DEEP, DIGITS = "@deep@", "@digits@"
"""Stand for brackets a hundred thousand deep and for a number of 5,000 digits, which json.dumps refuses to write."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400),
    *(0.5, -0.5, 1e-300, 5e-324, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "0", "1e5", "nan", "null", "é", "\x00", "\n", "\u2028", "\ud800", "🙂", "{x}", "%s", "${HOME}"),
    *("..", "../../x", "/", "/etc/passwd", "~", "a/b/c", "con", "-", "x" * 300, "x" * 100_000, "<script>", "[[1]]"),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, {str(i): i for i in range(1000)}, DEEP, DIGITS),
)
TOKENS = (
    *(b"&a ", b"*a", b"<<: ", b"- ", b": ", b"? ", b"{", b"}", b"[", b"]", b'"', b"'", b"|\n", b">\n", b"#", b"\t"),
    *(b"%", b"---\n", b"!!python/name:os.system ", b"!!binary ", b"!!set ", b"!!timestamp ", b"!x ", b"0x1F", b"1_000"),
    *(b".inf", b".nan", b"1e999", b"-0", b"0o7", b"12:30:45", b"2026-01-01", b"yes", b"~", b"null"),
    *(b"\\u0000", b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"\x00", b"\r", b"\n", b"\xc3", b"\xed\xa0\x80", b"="),
    *(b"9" * 400, b"[" * 2000, b"{a: " * 200),
)


def to_json(value: Any, lines: bool = False) -> bytes:
    """The value as JSON, or each item of a list on a line of its own."""
    text = "\n".join(map(json.dumps, value)) if lines and isinstance(value, list) else json.dumps(value)
    return text.replace(f'"{DEEP}"', "[" * 100_000).replace(f'"{DIGITS}"', "9" * 5000).encode()


def mutated(value: Any, rng: Random, others: Sequence[Any] = HOSTILE) -> Any:
    """A copy of JSON data with one to four places changed."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(root))
        _change(*rng.choice(places), rng, places, others)
    return root[0]


def _places(node: Any) -> Any:
    """Every container with each of its keys, the outermost first."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list) and len(node[key]) < 200:
            yield from _places(node[key])


def _change(node: Any, key: Any, rng: Random, places: list[Any], others: Sequence[Any]) -> None:
    if (isinstance(node, list) and key >= len(node)) or (isinstance(node, dict) and key not in node):
        return  # an earlier change took it
    old = node[key]
    way = rng.randrange(9)
    if way == 0 and isinstance(node, dict):
        del node[key]
    elif way == 1 and isinstance(node, dict):
        node[_word(str(key), rng)] = old
    elif way == 2 and isinstance(node, dict):
        node[_word(str(key), rng)] = node.pop(key)
    elif way == 3:
        other, name = rng.choice(places)
        if (isinstance(other, list) and name < len(other)) or (isinstance(other, dict) and name in other):
            node[key] = copy.deepcopy(other[name])
    elif way == 4 and isinstance(old, list):
        node[key] = rng.choice((old * 2, old[1:], old[::-1], old * 50))
    elif way == 5 and isinstance(old, str):
        node[key] = _word(old, rng)
    elif way == 6 and isinstance(old, int | float):
        node[key] = rng.choice((old + 1, old - 1, -old, old * 10, old * 1e6, old / 3, str(old), [old], float(old)))
    else:
        node[key] = copy.deepcopy(rng.choice(others))


def _word(text: str, rng: Random) -> str:
    """A text that is nearly this one."""
    place = rng.randrange(len(text) + 1)
    return rng.choice((text[:place] + text[place + 1 :], text[:place] + rng.choice("aZ0_.-/ {}\n\0é") + text[place:]))


def mutated_bytes(data: bytes, rng: Random, tokens: Sequence[bytes] = TOKENS) -> bytes:
    """The bytes with one to six changes: bits flipped, pieces cut, doubled, moved or put in."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        begin = rng.randrange(len(data) + 1)
        end = min(len(data), begin + rng.choice((1, 1, 2, 8, 64, 1024)))
        piece = data[begin:end]
        way = rng.randrange(8)
        if way == 0 and piece:
            data = data[:begin] + bytes([piece[0] ^ 1 << rng.randrange(8)]) + data[begin + 1 :]
        elif way == 1:
            data = data[:begin] + data[end:]
        elif way == 2:
            data = data[:begin] + piece + data[begin:]
        elif way == 3:
            place = rng.randrange(len(data) + 1)
            data = data[:place] + piece + data[place:]
        elif way == 4:
            data = data[:begin] + rng.randbytes(len(piece)) + data[end:]
        elif way == 5 and rng.random() < 0.3:
            data = data[:begin]
        else:
            data = data[:begin] + rng.choice(tokens) + data[begin:]
    return data
