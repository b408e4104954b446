"""What pydantic finds wrong with settings, in words: one clause per problem, with the path of its key."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tailrl.runtime.errors import one_line


def near(word: object, known: Mapping[str, object] | list[str]) -> str:
    """A question after the known name that is most like the word; nothing where none is like it."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys that the block at `path` knows, read off the JSON schema (unions give all of theirs)."""
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
    """One clause per problem, each with the path of the key; `model` is what was validated, to suggest keys of."""
    clauses = []
    found = error.errors()
    for item in found:
        if item["type"] == "too_short" and any(other["loc"][:-1] == item["loc"] for other in found):
            continue  # too short without those that are named themselves
        where = one_line(".".join(str(part) for part in item["loc"]))
        if item["type"] == "extra_forbidden":
            hint = near(item["loc"][-1], _known_keys(model, item["loc"][:-1])) if model else ""
            clauses.append(f"{where} is not a known key{hint}")
        elif item["type"] == "missing":
            clauses.append(f"{where} is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            shown = item["type"] == "kind" or not isinstance(item["input"], dict | BaseModel)
            given = f" (given: {one_line(repr(item['input']))})" if shown else ""
            clauses.append(f"{where}: {message}{given}" if where else message)
    return "; ".join(clauses)
