"""Study files: drawn from the published JSON schema, or a real one with damaged values or damaged text."""

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import yaml
from hypothesis import strategies as st
from kinds import Case, Kind
from mutations import HOSTILE, mutated, mutated_bytes, to_json

from tailrl.config.load import parse_settings, parse_study, read_config, read_study
from tailrl.config.study import Study
from tailrl.planning.machine import read_machine
from tailrl.planning.plan import StudyPlan, plan_page
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "workflow" / "schemas" / "study.schema.json").read_text(encoding="utf-8"))
FILES = [ROOT / "studies" / f"{name}.yaml" for name in ("tiny", "gpu", "gradient_quality", "paper")]
DRAWN = 50
"""Studies that hypothesis draws at once, one after another."""

WORDS = (
    *("a", "b", "e-5", "1e-6", "0.34/V", "vocabulary.rho", "training.steps"),
    *("estimator", "default", "trainer", "./x"),
)

KEYS = ("a", "b", "c", "rho", "steps", "base", "x/y")
BEGIN = {"name": "s", "arms": {"a": {}, "b": {"vocabulary": {"rule": "min_p", "rho": "e-9"}}}}


def prepare(folder: Path) -> None:
    """A study's file may name others beside it."""
    (folder / "base.yaml").write_text("name: b\narms: {a: {}}\n", encoding="utf-8")


@cache
def defined(name: str) -> st.SearchStrategy[Any]:
    """What a definition of the JSON schema allows."""
    return strategy(SCHEMA["$defs"][name])


def strategy(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a part of the JSON schema allows."""
    if "$ref" in node:
        return defined(node["$ref"].rsplit("/", 1)[1])
    if options := node.get("anyOf", node.get("oneOf")):
        return st.one_of([strategy(option) for option in options])
    if "const" in node or "enum" in node:
        return st.sampled_from(node.get("enum") or [node["const"]])
    match node.get("type"):
        case "object":
            return _object(node)
        case "array":
            return _array(node)
        case "string":
            known = st.from_regex(node["pattern"], fullmatch=True) if "pattern" in node else st.sampled_from(WORDS)
            return known | st.text(max_size=6)
        case "integer":
            least = node.get("minimum", -(2**65))
            return st.integers(least, node.get("maximum", abs(least) + 300))
        case "number":
            least, most = (
                node.get("minimum", node.get("exclusiveMinimum")),
                node.get("maximum", node.get("exclusiveMaximum")),
            )
            return st.floats(
                least, most, exclude_min="exclusiveMinimum" in node, exclude_max="exclusiveMaximum" in node
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.sampled_from([value for value in HOSTILE if not isinstance(value, dict)])


def _object(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    known = {name: strategy(child) for name, child in node.get("properties", {}).items()}
    if known:
        required = set(node.get("required", ()))
        optional = {name: child for name, child in known.items() if name not in required}
        return st.fixed_dictionaries({name: known[name] for name in required}, optional=optional)
    others = node.get("additionalProperties")
    return st.dictionaries(st.sampled_from(KEYS), strategy(others if isinstance(others, dict) else {}), max_size=3)


def _array(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "prefixItems" in node:
        return st.tuples(*map(strategy, node["prefixItems"])).map(list)
    return st.lists(strategy(node["items"]), min_size=node.get("minItems", 0), max_size=node.get("maxItems", 4))


STUDY = strategy(SCHEMA)


def drawn(seed: int) -> list[Any]:
    """Studies that the schema allows, each with a name and arms."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=DRAWN,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(STUDY)
    def draw(study: Any) -> None:
        found.append(BEGIN | study)

    draw()
    return found


def cases(rng: Random) -> Iterator[Case]:
    """As YAML, which `tailrl check` reads, as JSON, which rules hand on, and as plain data, which Snakemake has."""
    texts = [path.read_bytes() for path in FILES]
    known = [yaml.safe_load(text) for text in texts]
    while True:
        for study in drawn(rng.getrandbits(64)):
            name = rng.choice(("study.json", "plain.json", "plain.json", "study.yaml"))
            yield name, to_json(mutated(study, rng) if rng.random() < 0.5 else study)
        for _ in range(DRAWN * 3):
            study = mutated(rng.choice(known), rng, (*HOSTILE, *WORDS))
            yield rng.choice(("study.json", "plain.json")), to_json(study)
        for _ in range(DRAWN):
            yield "study.yaml", mutated_bytes(rng.choice(texts), rng)


def read(folder: Path, name: str) -> None:
    """As the reader of its kind does; what it accepts is planned, and each arm's job gets its settings."""
    file = folder / name
    if name == "study.yaml":
        study = read_study(file)
        assert read_config(file)
    elif name == "study.json":
        study = parse_settings(Study, str(file))
    else:
        try:
            data = dict(json.loads(file.read_bytes()))
        except (ValueError, TypeError, RecursionError):  # Snakemake refuses these
            return
        study = parse_study(data, str(file))
    try:
        study.check_files()
    except StudyError as error:  # the command line says which file is meant
        raise StudyError(f"{file}: {error}") from None
    for arm in study.all_arms():
        study.run(arm).model_dump_json()
    assert parse_settings(Study, study.model_dump_json()) == study
    with contextlib.suppress(StudyError):  # sizes that are not known
        plan_page(StudyPlan(study, read_machine(None, "80GB"), 1))


KIND = Kind("studies", prepare, cases, read)
