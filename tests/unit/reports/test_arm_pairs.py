"""Which arms are compared, by their settings."""

from claims_fixture import DVP, EXACT, MATCHED, NAIVE, NOISE, made, results_of

from tailrl.claims.catalogue import CATALOGUE
from tailrl.reports.arm_pairs import pairs_of, ties

HARM = ("vexact.a.score", "vexact.a.score.matched")
FP8 = {"sampler": {"kv_cache_dtype": "fp8_e4m3"}}
TWIN = {"sampler": {**EXACT["sampler"], **FP8["sampler"]}}
INT4 = {"sampler": {"quantization": "int4", "group_size": 32}}
INT4_TWIN = {"sampler": {**EXACT["sampler"], **INT4["sampler"]}}


def test_a_quantised_engine_is_paired_with_its_own_twin_alone() -> None:
    """Whatever dtype it computes in; the naive exact engine is the reference without a mismatch of all."""
    results = results_of(
        exact=made(EXACT),
        bf16=made(NAIVE),
        fp8=made(FP8),
        half=made({"sampler": {**FP8["sampler"], "dtype": "float16"}}),
        twin=made(TWIN),
        int4=made(INT4),
        int4_twin=made(INT4_TWIN),
        channel=made({"sampler": {"quantization": "int4"}}),
        dvp=made({**DVP, **FP8}),
    )
    found = ties(results)
    assert [tie[:2] for tie in found if tie[2] == "matched control"] == [
        ("fp8", "twin"),
        ("half", "twin"),
        ("int4", "int4_twin"),
    ]
    assert [tie[:2] for tie in found if tie[2] == "no mismatch"] == [
        (arm, "exact") for arm in ("bf16", "fp8", "half", "twin", "int4", "int4_twin", "channel")
    ]
    assert [tie[:2] for tie in found if tie[2] == "naive"] == [("dvp", "fp8")]


def test_a_disturbed_quantised_engine_is_paired_with_its_disturbed_twin() -> None:
    results = results_of(
        noisy=made({**FP8, **NOISE}),
        both=made({**TWIN, **MATCHED}),
        twin=made(TWIN),
        plain=made({**EXACT, **MATCHED}),
        plain_noise=made({**EXACT, **NOISE}),
        bf16_noise=made(NOISE),
    )
    found = ties(results)
    assert [tie[:2] for tie in found if tie[2] == "matched control"] == [("noisy", "both"), ("plain_noise", "plain")]


def test_claims_compare_a_quantised_engine_with_its_twin_by_mismatch_alone() -> None:
    scores = {"score": [0.5] * 4}
    results = results_of(
        exact=made(EXACT, **scores), bf16=made(NAIVE, **scores), fp8=made(FP8, **scores), twin=made(TWIN, **scores)
    )
    read = {claim: list(pairs_of(CATALOGUE[claim], results)) for claim in HARM}
    assert read == {
        "vexact.a.score": [("bf16", "exact"), ("fp8", "exact")],
        "vexact.a.score.matched": [("fp8", "twin")],
    }
