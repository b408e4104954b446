"""Which arms a CPU without a format's instructions leaves out of a study."""

from typing import Any

import pytest

from tailrl.config.load import parse_study
from tailrl.config.study import Study
from tailrl.planning.formats import without_lacking
from tailrl.runtime.errors import StudyError

PLAIN = {"fma", "avx2", "avx512f"}
WIDE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
CACHE = {"sampler": {"kv_cache_dtype": "fp8_e4m3"}}
TWIN = {"sampler": {"engine": "exact", "dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}}
WEIGHTS = {"sampler": {"quantization": "fp8"}}
NEEDS = "on a CPU an fp8 cache needs AVX-512 or AMX, which this one has not"
INT4_NEEDS = "on a CPU int4 weights need AVX-512, which this one has not"


def study(**arms: Any) -> Study:
    return parse_study({"name": "s", "description": "Words.", "arms": arms})


@pytest.mark.parametrize("flags", [WIDE, {"amx_tile"}, WIDE | PLAIN, set()])
def test_a_cpu_with_the_instructions_or_without_a_word_leaves_nothing_out(flags: set[str]) -> None:
    whole = study(naive={}, fp8=CACHE, twin=TWIN)
    assert without_lacking(whole, flags) == (whole, "")


@pytest.mark.parametrize("flags", [PLAIN, WIDE - {"avx512vl"}])
def test_arms_of_an_fp8_cache_are_left_out_and_their_twin_stays(flags: set[str]) -> None:
    found, sentence = without_lacking(study(naive={}, fp8=CACHE, twin=TWIN, both=CACHE), flags)
    assert list(found.arms) == ["naive", "twin"]
    assert sentence == f"left out, since {NEEDS}: arms fp8, both"
    assert found.description == f"Words. L{sentence[1:]}."


def test_fp8_weights_need_a_gpu_whatever_the_cpu_is() -> None:
    found, sentence = without_lacking(study(naive={}, weights=WEIGHTS), WIDE)
    assert list(found.arms) == ["naive"]
    assert sentence == "left out, since fp8 weights need a GPU: arms weights"


@pytest.mark.parametrize(
    ("flags", "left", "words"),
    [
        (PLAIN | {"avx_vnni"}, ["naive", "int8"], f"{NEEDS}; {INT4_NEEDS}"),
        (WIDE, ["naive", "int4", "both"], "on a CPU int8 weights need VNNI, which this one has not"),
        (WIDE | {"avx512_vnni"}, ["naive", "int8", "int4", "both"], ""),
        (set(), ["naive", "int8", "int4", "both"], ""),
    ],
)
def test_int8_weights_need_vnni_and_int4_weights_wide_vectors(flags: set[str], left: list[str], words: str) -> None:
    formats = {"both": {"sampler": {"quantization": "int4", "kv_cache_dtype": "fp8_e4m3"}}}
    formats |= {name: {"sampler": {"quantization": name}} for name in ("int8", "int4")}
    found, sentence = without_lacking(study(naive={}, **formats), flags)
    assert set(found.arms) == set(left)
    assert sentence.startswith(f"left out, since {words}: arms " if words else "") and bool(sentence) == bool(words)


def test_ablations_and_compared_engines_go_too() -> None:
    """An ablation without one of its arms would answer another question."""
    ablations = {
        "of_cache": {"base": "naive", "field": "sampler.kv_cache_dtype", "values": ["auto", "fp8_e4m3"]},
        "of_base": {"base": ["naive", "fp8"], "field": "disturbance.floor", "values": [0.0, 0.1]},
        "rate": {"base": "naive", "field": "training.learning_rate", "values": [1e-4, 3e-4]},
    }
    engines = {"plain": {}, "coarse": CACHE, "weights": WEIGHTS}
    whole = parse_study(
        {
            "name": "s",
            "arms": {"naive": {}, "fp8": CACHE},
            "ablations": ablations,
            "distributions": {"engines": engines},
        }
    )
    found, sentence = without_lacking(whole, PLAIN)
    assert (list(found.arms), list(found.ablations)) == (["naive"], ["rate"])
    assert list(found.distributions.engines) == ["plain"]
    assert "engines" in found.distributions.model_fields_set, "the page of distributions is still asked for"
    assert set(found.runs()) == {"naive", "rate=0.0003"}
    assert sentence == (
        f"left out, since {NEEDS}; fp8 weights need a GPU: arms fp8, ablations of_cache, of_base, compared engines "
        "coarse, weights"
    )


def test_where_nothing_is_left_it_is_refused() -> None:
    with pytest.raises(StudyError, match=rf"^s: nothing is left of it here: left out, since {NEEDS}: arms fp8$"):
        without_lacking(study(fp8=CACHE), PLAIN)
    measured = parse_study({"name": "s", "arms": {"a": {}}, "distributions": {"engines": {"coarse": CACHE}}})
    with pytest.raises(StudyError, match=r"nothing is left of it here: .*: compared engines coarse$"):
        without_lacking(measured, PLAIN)
    evaluated = parse_study({"name": "s", "arms": {"a": {}}, "evaluation": CACHE})
    with pytest.raises(StudyError, match=rf"^evaluation\.sampler: {NEEDS}$"):
        without_lacking(evaluated, PLAIN)
