"""Puts pydantic's errors into words: one clause per problem, with the path of its key."""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tailrl.config.base import IMPORTED, NAME_RULE
from tailrl.runtime.errors import LONGEST, one_line


def near(word: object, known: Mapping[str, object] | list[str]) -> str:
    """A question that names the known word most like this one; empty if no known word is like it."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


LIST, BLOCK = "must be a list, such as [0, 1]", "must be a block of keys and values, such as {}"
PLAIN = {
    **dict.fromkeys(("tuple_type", "list_type"), LIST),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), BLOCK),
    "string_pattern_mismatch": f"needs {NAME_RULE}",
    "string_type": "needs text",
}
"""By the type of pydantic's error: words that name YAML's types, where pydantic names Python's."""


MOST_FAULTS = 10
"""Clauses of a sentence; the rest are counted."""


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def shown(value: object) -> str:
    """What was given, on one line, as YAML has it."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value)) or one_line(repr(value))


def _walk(model: type[BaseModel], path: tuple[int | str, ...]) -> tuple[list[str], list[dict[str, Any]]]:
    """The path without pydantic's names of kinds, and the properties of each block that may stand there."""
    schema = _schema(model)

    def resolve(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            return resolve(schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
        options = node.get("oneOf", []) + node.get("anyOf", [])
        return [found for option in options for found in resolve(option)] or [node]

    nodes, keys = resolve(schema), list[str]()
    for part in path:
        following = []
        for node in nodes:
            named = node.get("items") if isinstance(part, int) else node.get("additionalProperties")
            child = node.get("properties", {}).get(part, named)
            following += resolve(child) if isinstance(child, dict) else []
        kinds = [node for node in nodes if part in _constants(node) or (part == IMPORTED and not _constants(node))]
        if following or not kinds:
            keys.append(str(part))
        nodes = following or kinds or nodes
    return keys, [node.get("properties", {}) for node in nodes]


def _constants(node: dict[str, Any]) -> list[str]:
    """What a block's keys must be where they allow one word: its kind."""
    return [key["const"] for key in node.get("properties", {}).values() if "const" in key]


def _other_kind(item: ErrorDetails, model: type[BaseModel] | None) -> str:
    """Names the kinds of block there are, where the given kind is none of them."""
    field, given = item["ctx"]["field"], item["input"]
    blocks = _walk(model, item["loc"])[1] if model else []
    kinds = sorted(block[field]["const"] for block in blocks if "const" in block.get(field, {}))
    one = f"one of {', '.join(kinds)}"
    if isinstance(given, dict):
        return f".{field}: must be {one} (given: {shown(given[field])}){near(given[field], kinds)}"
    return f": must be a block whose {field} is {one} (given: {shown(given)})"


def sentences(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """One clause per problem, with the path of its key; `model` was validated, and its keys are suggested."""
    clauses = []
    errors = error.errors()
    inner = {item["loc"][:-1] for item in errors}
    # What has entries with errors of their own is too short only because of these.
    found = [item for item in errors if item["type"] != "too_short" or item["loc"] not in inner]
    for item in found[:MOST_FAULTS]:
        keys = _walk(model, item["loc"])[0] if model else [str(part) for part in item["loc"]]
        where = one_line(".".join(keys))
        if item["type"] == "extra_forbidden":
            known = {key for block in _walk(model, item["loc"][:-1])[1] for key in block} if model else set()
            hint = near(item["loc"][-1], sorted(known))
            clauses.append(f"{where} is not a known key{hint}")
        elif item["type"] == "missing":
            clauses.append(f"{where} is missing")
        elif item["type"] == "literal_error":
            kinds = re.findall(r"'([^']*)'|\b(\d+)\b", item["ctx"]["expected"])
            kinds = [text or number for text, number in kinds]
            given = shown(item["input"])
            clauses.append(f"{where}: must be one of {', '.join(kinds)} (given: {given}){near(item['input'], kinds)}")
        elif item["type"] == "kind":
            clauses.append(where + _other_kind(item, model))
        else:
            message = PLAIN.get(item["type"], item["msg"].removeprefix("Value error, "))
            if len(message) > 2 * LONGEST:  # it quotes what was given
                message = one_line(message)
            given = "" if isinstance(item["input"], dict | BaseModel) else f" (given: {shown(item['input'])})"
            clauses.append(f"{where}: {message}{given}" if where else message)
    return "; ".join([*clauses, f"and {len(found) - MOST_FAULTS} more"] if len(found) > MOST_FAULTS else clauses)
