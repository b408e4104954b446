"""Puts pydantic's errors into words: one clause per problem, with the path of its key."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tailrl.runtime.errors import one_line

PLAIN = {
    "tuple_type": "needs a list",
    "dict_type": "needs a block of keys",
    "model_type": "needs a block of keys; {} takes the defaults",
}
"""By the type of pydantic's error: words that name YAML's types, where pydantic names Python's."""


def near(word: object, known: Mapping[str, object] | list[str]) -> str:
    """A question that names the known word most like this one; empty if no known word is like it."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the block at `path`, from the JSON schema; for a union, the keys of all members."""
    schema = model.model_json_schema()

    def resolve(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            return resolve(schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
        options = node.get("oneOf", []) + node.get("anyOf", [])
        return [found for option in options for found in resolve(option)] or [node]

    nodes = resolve(schema)
    for part in path:
        following = []
        for node in nodes:
            child = node.get("properties", {}).get(part, node.get("additionalProperties"))
            following += resolve(child) if isinstance(child, dict) else []
        nodes = following or nodes
    return sorted({key for node in nodes for key in node.get("properties", {})})


def sentences(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """One clause per problem, with the path of its key; `model` was validated, and its keys are suggested."""
    clauses = []
    found = error.errors()
    for item in found:
        if item["type"] == "too_short" and any(other["loc"][:-1] == item["loc"] for other in found):
            continue  # it is too short only because of entries with errors of their own
        where = one_line(".".join(str(part) for part in item["loc"]))
        if item["type"] == "extra_forbidden":
            hint = near(item["loc"][-1], _known_keys(model, item["loc"][:-1])) if model else ""
            clauses.append(f"{where} is not a known key{hint}")
        elif item["type"] == "missing":
            clauses.append(f"{where} is missing")
        else:
            message = PLAIN.get(item["type"], item["msg"].removeprefix("Value error, "))
            shown = item["type"] == "kind" or not isinstance(item["input"], dict | BaseModel)
            given = f" (given: {one_line(repr(item['input']))})" if shown else ""
            clauses.append(f"{where}: {message}{given}" if where else message)
    return "; ".join(clauses)
