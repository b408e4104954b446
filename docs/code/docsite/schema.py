"""reference/study.md: every key of a study file, from its JSON schema."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docsite.markdown import plain, table

SCHEMA = "workflow/schemas/study.schema.json"
DIAGNOSIS = "workflow/schemas/diagnosis.schema.json"
DIAGNOSIS_HEAD = f"""# A diagnosis as data

Every key of what `tailrl diagnose --json` and `tailrl probe --json` write: one of LogRecord, ChangeRecord and
CurvesRecord, by its `kind`. This page is made from [the JSON schema](../../{DIAGNOSIS}). Sizes are in nats.
"""
HEAD = f"""# The study file

Every key of `config.yaml` and of the files in `studies/`. `tailrl check FILE` refuses an unknown key and a wrong value
with one sentence. Editors complete keys by [the JSON schema](../../{SCHEMA}), from which this page is made.
"""
LONGEST_DEFAULT = 40
"""Characters; a longer default is that of the block's own keys."""


def schema_page(root: Path) -> str:
    """The page: a section for each block, in the order in which a study meets them."""
    schema = json.loads((root / SCHEMA).read_text(encoding="utf-8"))
    blocks = {"Study": schema, **schema["$defs"]}
    found = units()
    order = dict.fromkeys(_reached("Study", blocks))
    return "\n".join([HEAD, *(_block(name, blocks[name], found) for name in order)])


def diagnosis_page(root: Path) -> str:
    """The page on a diagnosis as data: a section for each block."""
    blocks = json.loads((root / DIAGNOSIS).read_text(encoding="utf-8"))["$defs"]
    kinds = [name for name in ("LogRecord", "ChangeRecord", "CurvesRecord") if name in blocks]
    order = dict.fromkeys(reached for name in kinds for reached in _reached(name, blocks))
    return "\n".join([DIAGNOSIS_HEAD, *(_block(name, blocks[name], {}) for name in order)])


def units() -> dict[str, str]:
    """The unit of each number, by `Block.key`."""
    by_unit = yaml.safe_load(Path(__file__).with_name("units.yaml").read_text(encoding="utf-8"))
    return {key: unit for unit, keys in by_unit.items() for key in keys}


def numbers(schema: Mapping[str, Any]) -> Iterator[str]:
    """Each key that holds a number or several, as `Block.key`."""
    for name, block in {"Study": schema, **schema["$defs"]}.items():
        for key, value in block["properties"].items():
            if set(_kinds(value)) & {"number", "integer"}:
                yield f"{name}.{key}"


def _reached(name: str, blocks: Mapping[str, Any]) -> Iterator[str]:
    yield name
    for value in blocks[name]["properties"].values():
        for reference in _references(value):
            yield from _reached(reference, blocks)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for own in value.values():
            yield from _references(own)
    elif isinstance(value, list):
        for own in value:
            yield from _references(own)


def _kinds(value: Mapping[str, Any]) -> Iterator[str]:
    """The JSON types that a key takes, those inside lists among them."""
    if "type" in value:
        yield value["type"]
    for own in (*value.get("anyOf", ()), *value.get("prefixItems", ()), *filter(None, [value.get("items")])):
        yield from _kinds(own)


def _block(name: str, block: Mapping[str, Any], unit_of: Mapping[str, str]) -> str:
    words = dict.fromkeys(block.get("then", {}).get("required", ()), "needed, unless it extends a file")
    words |= dict.fromkeys(block.get("required", ()), "needed")
    rows = []
    for key, value in block["properties"].items():
        default = words.get(key) or _default(value)
        unit = unit_of.get(f"{name}.{key}", "")
        rows.append((f"`{key}`", _type(value), default, unit.replace("1", ""), _meaning(value)))
    text = plain(block.get("description", ""))
    return f"## {name}\n\n{text}\n\n{table(('key', 'takes', 'default', 'unit', 'meaning'), rows)}"


def _type(value: Mapping[str, Any]) -> str:
    """What a key takes: a link to a block, the words it may be, or the type with its limits."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in value:
            return _or(_type(own) for own in value[several])
    if "enum" in value:
        return _or(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        inside = [value["items"]] if "items" in value else value.get("prefixItems", [])
        return "list of " + _or(_type(own) for own in inside)
    if value.get("type") == "object":
        inside = value.get("additionalProperties")
        return "mapping" + (f" of names to {_type(inside)}" if isinstance(inside, dict) else "")
    return str(value.get("type", "any")) + _limits(value)


def _or(words: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))


def _limits(value: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return "".join(f" {sign} {value[name]:g}" for name, sign in signs.items() if name in value)


def _default(value: Mapping[str, Any]) -> str:
    if "default" not in value:
        return ""
    shown = json.dumps(value["default"], ensure_ascii=False)
    return f"`{shown}`" if len(shown) <= LONGEST_DEFAULT else "the block's own"


def _meaning(value: Mapping[str, Any]) -> str:
    return plain(" ".join(value.get("description", "").split()))
