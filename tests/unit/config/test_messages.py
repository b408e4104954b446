"""Pydantic's errors in words: YAML's, with the path as it is written."""

from typing import Any

import pytest

from tailrl.config.load import parse_study
from tailrl.runtime.errors import StudyError


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": 3}, "seeds: must be a list, such as [0, 1] (given: 3)"),
        ({"arms": {"naive": None}}, "arms.naive: must be a block of keys and values, such as {} (given: null)"),
        ({"name": "a b"}, "name: needs at most 100 letters, digits, _ . + - (given: 'a b')"),
        ({"training": {"steps": True}}, "training.steps: needs a number, not true or false (given: true)"),
        ({"policy": {"source": "pretrained", "path": "/", "layers": 2}}, "policy.layers is not a known key"),
        (
            {"task": {"name": "arithmetics"}},
            "task.name: must be one of aime25, arithmetic, chain, dapo_math, words (given: 'arithmetics') (did you "
            "mean 'arithmetic'?)",
        ),
        ({"policy": None}, "policy: must be a block whose source is one of pretrained, scratch (given: null)"),
        (
            {"policy": {"warm_start": {"stages": [{"name": "dapo_math"}]}}},
            "policy.warm_start.stages.0.name: must be one of arithmetic, chain, words (given: 'dapo_math')",
        ),
    ],
)
def test_what_stands_in_the_wrong_place_is_said_in_words(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study({"name": "s", "arms": {"a": {}}} | changes)
    assert str(caught.value) == f"the study: {sentence}"
