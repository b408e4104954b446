"""The study's block on whole distributions: the settings of its job, and refusals in one sentence."""

from typing import Any

import pytest

from tailrl.config.load import parse_study
from tailrl.config.study import Study
from tailrl.runtime.errors import StudyError


def study_with(block: dict[str, Any], **others: Any) -> Study:
    return parse_study({"name": "s", "arms": {"naive": {}}, "distributions": block, **others}, "my.yaml")


def test_a_job_gets_its_engine_and_the_training_settings_that_it_needs() -> None:
    """And nothing else: another learning rate must not make it stale."""
    block = {"engines": {"a": {"rescored": 7}, "b": {}}, "rho": ["e-5", 1e-6, "0.34/V"]}
    training = {"temperature": 0.6, "max_new_tokens": 11, "token_budget": 99}
    job = study_with(block, training=training).compared("a")
    assert job == study_with(block, training={**training, "learning_rate": 1e-6}).compared("a")
    assert (job.name, job.engine.rescored, job.rho) == ("a", 7, ("e-5", "1e-06", "0.34/V"))
    assert {key: getattr(job, key) for key in training} == training
    assert (job.responses, job.every, job.seed) == (1000, 4, 0)


def test_the_default_engines() -> None:
    """The natural mismatch, two finer dtypes and another engine, and between which floor and which zero they lie."""
    engines = study_with({}).distributions.engines
    assert {(e.sampler.engine, e.sampler.dtype, e.rescored) for e in engines.values()} == {
        ("vllm", "bfloat16", None),
        ("vllm", "float16", None),
        ("vllm", "float32", None),
        ("transformers", "bfloat16", None),
        ("vllm", "bfloat16", 1),
        ("exact", "float32", None),
    }


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"engine": {}}, "distributions.engine is not a known key (did you mean 'engines'?)"),
        ({"engines": {}}, "distributions.engines: "),
        ({"engines": {"a/b": {}}}, "distributions.engines: 'a/b' cannot name an engine"),
        ({"engines": {"a": {"samplr": {}}}}, "distributions.engines.a.samplr is not a known key (did you mean"),
        ({"engines": {"a": {"sampler": {"engine": "vlm"}}}}, "distributions.engines.a.sampler.engine: must be one of"),
        ({"engines": {"a": {"sampler": {"engine": "exact"}}}}, "distributions.engines.a.sampler: engine: exact"),
        (
            {"engines": {"a": {"sampler": {"engine": "exact", "dtype": "float32", "quantization": "int8"}}}},
            "distributions.engines.a: sampler: engine: exact quantises the trainer likewise: there is nothing",
        ),
        ({"engines": {"a": {"sampler": {"verify": True}}}}, "distributions.engines.a: sampler.verify draws from the"),
        ({"engines": {"a": {"disturbance": {"staleness": 2}}}}, "distributions.engines.a: disturbance.staleness needs"),
        (
            {"engines": {"a": {"rescored": 5, "disturbance": {"noise": 1.0}}}},
            "distributions.engines.a: rescored compares the trainer with itself: leave out disturbance",
        ),
        (
            {"engines": {"a": {"rescored": 5, "sampler": {"routes": True}}}},
            "distributions.engines.a: rescored compares the trainer with itself: leave out sampler.routes",
        ),
        (
            {"engines": {"a": {"sampler": {"routes": True}}}},
            "distributions.engines.a.sampler.routes: the policy is dense and has no experts; leave it out",
        ),
        (
            {"engines": {"a": {"rescored": 0}}},
            "distributions.engines.a.rescored: Input should be greater",
        ),
        ({"rho": []}, "distributions.rho: "),
        ({"rho": "e-13"}, "distributions.rho: "),
        ({"rho": ["e-13", "big"]}, "distributions.rho.1: write e-13, 1e-6 or 0.34/V, with a value in (0, 1]"),
        ({"rho": [True]}, "distributions.rho.0: needs text"),
        ({"every": 0}, "distributions.every: Input should be greater than or equal to 1"),
        ({"responses": 0}, "distributions.responses: Input should be greater than or equal to 1"),
    ],
)
def test_what_is_impossible_is_one_sentence(block: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError) as caught:
        study_with(block)
    sentence = str(caught.value)
    assert sentence.startswith("my.yaml: ") and words in sentence
    assert "\n" not in sentence and "Value error" not in sentence


def test_a_rho_over_one_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(StudyError, match=r"my.yaml: distributions.rho: 900/V is above 1 for 600 tokens"):
        study_with({"rho": ["900/V"]}, policy={"vocabulary_size": 600})
    study_with({"rho": ["900/V"]}, policy={"vocabulary_size": 900})
