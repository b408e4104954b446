"""Which engines take which formats of weights, keys and values."""

from typing import Any

import pytest
from refusal_fixture import refusal, study_with

from tailrl.config.load import parse_study
from tailrl.config.study import Study
from tailrl.runtime.errors import StudyError


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"quantization": "int3"}, "sampler.quantization: must be one of int8, int4, fp8"),
        ({"quantization": "int4", "group_size": 48}, "sampler.group_size: must be one of 32, 64, 128"),
        ({"quantization": "int8", "group_size": 32}, "group_size is of int4 weights: say quantization: int4, or leave"),
        ({"group_size": 32}, "group_size is of int4 weights"),
        (
            {"quantization": "int4", "dtype": "float32"},
            "quantization: int4 computes in half precision in vLLM: say dtype",
        ),
        ({"engine": "transformers", "quantization": "int8"}, "engine: transformers does not use quantization"),
        (
            {"engine": "exact", "quantization": "int8"},
            "engine: exact computes as the trainer does, in float32: say dtype",
        ),
        (
            {"quantization": "int8", "tensor_parallel": 2},
            "quantization: ranks that share an engine have slices of a row, whose scales are not the row's: leave out",
        ),
        ({"routes": True, "tensor_parallel": 2}, "routes: ranks that share an engine do not say which experts"),
    ],
)
def test_formats_that_no_engine_has(sampler: dict[str, Any], words: str) -> None:
    assert words in refusal({"sampler": sampler})


@pytest.mark.parametrize("where", ["arms.a", "evaluation", "distributions.engines.e"])
def test_experts_in_few_bits_are_refused_before_their_warm_start(where: str) -> None:
    """A dense policy in few bits, and experts with an 8-bit cache, are not."""
    experts = {"experts": 4, "intermediate_size": 64}

    def study(policy: dict[str, Any], **sampler: str) -> Study:
        given: dict[str, Any] = {"name": "s", "arms": {"a": {}}, "policy": policy}
        *path, last = where.split(".")
        place = given
        for name in path:
            place = place.setdefault(name, {})
        place[last] = {"sampler": sampler}
        return parse_study(given)

    with pytest.raises(StudyError, match=rf"{where}\.sampler\.quantization: the policy is a mixture, whose"):
        study(experts, quantization="int8")
    study({}, quantization="int8")
    study(experts, kv_cache_dtype="fp8_e4m3")


def test_every_format_has_a_twin_in_the_exact_engine() -> None:
    for kind in ("int8", "int4", "fp8"):
        for cache in ("auto", "fp8_e4m3", "fp8_e5m2"):
            given = {"quantization": kind, "kv_cache_dtype": cache, "group_size": 32 if kind == "int4" else None}
            assert not study_with({"sampler": given}).run("a").sampler.quantizes_trainer
            twin = study_with({"sampler": {**given, "engine": "exact", "dtype": "float32"}}).run("a").sampler
            assert twin.quantizes_trainer and twin.quantized
    assert not study_with({"sampler": {"engine": "exact", "dtype": "float32"}}).run("a").sampler.quantizes_trainer
