"""Pydantic's errors in words: YAML's, with the path as it is written."""

from typing import Any

import pytest
from pydantic import ValidationError

from tailrl.config.arm import Arm, Clip, Correction
from tailrl.config.base import Settings
from tailrl.config.load import parse_study
from tailrl.config.messages import sentences
from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.config.study import Study
from tailrl.config.training import Training
from tailrl.config.vocabulary import Vocabulary
from tailrl.runtime.errors import StudyError


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": 3}, "seeds: must be a list, such as [0, 1] (given: 3)"),
        ({"arms": {"naive": [1]}}, "arms.naive: must be a block of keys and values, such as {} (given: [1])"),
        ({"name": "a b"}, "name: needs at most 100 letters, digits, _ . + - (given: 'a b')"),
        ({"training": {"steps": True}}, "training.steps: needs a number, not true or false (given: true)"),
        (
            {"policy": {"source": "pretrained", "path": "/", "layers": 2}},
            "policy: source: pretrained does not use layers",
        ),
        (
            {"task": {"name": "arithmetics"}},
            "task.name: must be one of acrostic, aime25, arithmetic, chain, dapo_math, lm_eval, words "
            "(given: 'arithmetics') (did you mean 'arithmetic'?)",
        ),
        ({"policy": None}, "policy: must be a block whose source is one of pretrained, scratch (given: null)"),
        (
            {"policy": {"warm_start": {"stages": [{"name": "dapo_math"}]}}},
            "policy.warm_start.stages.0.name: must be one of acrostic, arithmetic, chain, words (given: 'dapo_math')",
        ),
    ],
)
def test_what_stands_in_the_wrong_place_is_said_in_words(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study({"name": "s", "arms": {"a": {}}} | changes)
    assert str(caught.value) == f"the study: {sentence}"


def words_alone(schema: dict[str, Any]) -> dict[str, list[str]]:
    """The keys of each block that take no number, truth, list or block: text, or one of some words."""
    found: dict[str, list[str]] = {}
    for name, block in schema["$defs"].items():
        for key, node in block.get("properties", {}).items():
            options = node.get("anyOf", [node])
            kinds = {option.get("type", "string" if "enum" in option else "") for option in options}
            if kinds and kinds <= {"string", "null"} and "const" not in node:
                found.setdefault(name, []).append(key)
    return found


BLOCKS: dict[str, type[Settings]] = {
    block.__name__: block
    for block in (
        *(Arm, Correction, Disturbance, Training),
        *(kind for kinds in (Clip, SamplerSettings, Vocabulary) for kind in kinds.kinds().values()),
    )
}
TEXTS = [(name, key) for name, keys in words_alone(Study.model_json_schema()).items() for key in keys if name in BLOCKS]


@pytest.mark.parametrize(("name", "key"), TEXTS)
@pytest.mark.parametrize("value", [True, ["a"], {"a": 1}, 3.5], ids=["truth", "list", "block", "number"])
def test_where_words_are_needed_nothing_else_is_asked_for(name: str, key: str, value: object) -> None:
    if (key, value) in (("rho", 3.5), ("rho_easy", 3.5)):
        return  # a number is written as text there
    with pytest.raises(ValidationError) as caught:
        BLOCKS[name].model_validate(
            {key: value, **({"dtype": "float32"} if name == "ExactSettings" and key != "dtype" else {})}
        )
    (sentence,) = [words for words in sentences(caught.value, BLOCKS[name]).split("; ") if words.startswith(key)]
    assert "needs text" in sentence or "must be one of" in sentence
    assert "number" not in sentence


def test_there_are_such_keys() -> None:
    assert len(TEXTS) > 15 and ("VllmSettings", "quantization") in TEXTS
