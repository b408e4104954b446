"""Kinds of arms, by their settings."""

from typing import Any

import pytest
from claims_fixture import DVP, DVP_MIS, EXACT, MATCHED, NAIVE, NOISE, made, results_of, settings_of

from tailrl.analysis import arm_kinds
from tailrl.claims import endpoints
from tailrl.claims.catalogue import CATALOGUE

HARM = ("vexact.a.score", "vexact.a.score.matched")

CLIP = {"ratio": "recompute", "low": 0.2, "high": 0.2}
ROLES = (arm_kinds.is_naive, arm_kinds.is_dvp, arm_kinds.is_dvp_mis)


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        (NAIVE, arm_kinds.is_naive),
        ({"clip": CLIP}, arm_kinds.is_naive),
        ({"correction": {"sequence": "mis"}}, None),
        ({"correction": {"token": "tis"}}, None),
        ({"correction": {"veto": 1e-4}}, None),
        ({"clip": {"ratio": "bypass"}}, None),
        ({"clip": {"ratio": "decoupled"}}, None),
        ({"vocabulary": {"rule": "top_k", "k": 5}}, None),
        (DVP, arm_kinds.is_dvp),
        ({**DVP, "correction": {"veto": 1e-4}}, arm_kinds.is_dvp),
        (DVP_MIS, arm_kinds.is_dvp_mis),
        ({"vocabulary": {"rule": "entropy", "rho": "e-5"}}, None),
        ({"vocabulary": {"rule": "min_p", "rho": "e-5", "side": "sampler"}}, None),
        ({"vocabulary": {"rule": "min_p", "rho": "e-5", "adapt": "budget", "budget": 0.1}}, None),
        ({**DVP, "correction": {"sequence": "tis"}}, None),
        ({**DVP, "correction": {"sequence": "mis", "token": "tis"}}, None),
        ({**DVP, "clip": {"ratio": "decoupled"}}, None),
        ({**DVP_MIS, "clip": {"ratio": "bypass"}}, None),
    ],
)
def test_the_kind_of_an_arm_follows_from_all_its_settings(changes: dict[str, Any], role: arm_kinds.Role | None) -> None:
    settings = arm_kinds.settings_of(results_of(arm=made(changes)), "arm")
    assert [known for known in ROLES if known(settings)] == ([role] if role else [])


VERIFIED = {"sampler": {"verify": True}}
FP8 = {"sampler": {"kv_cache_dtype": "fp8_e4m3"}}
TWIN = {"sampler": {**EXACT["sampler"], **FP8["sampler"]}}
INT4 = {"sampler": {"quantization": "int4", "group_size": 32}}
INT4_TWIN = {"sampler": {**EXACT["sampler"], **INT4["sampler"]}}
PLACES = (
    arm_kinds.is_mismatched,
    arm_kinds.has_own_mismatch,
    arm_kinds.has_no_mismatch,
    arm_kinds.has_exact_engine,
    arm_kinds.is_matched,
)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        (NAIVE, (True, True, False, False, False)),
        (NOISE, (True, False, False, False, False)),
        (MATCHED, (False, False, False, False, True)),
        (EXACT, (False, False, True, True, False)),
        (VERIFIED, (False, False, True, False, False)),
        ({**VERIFIED, **NOISE}, (False, False, True, False, False)),
        ({**VERIFIED, **MATCHED}, (False, False, False, False, True)),
        (FP8, (True, True, False, False, False)),
        ({"sampler": {**FP8["sampler"], "verify": True}}, (False, False, True, False, False)),
        (TWIN, (False, False, False, False, True)),
        (INT4_TWIN, (False, False, False, False, True)),
        ({**TWIN, **NOISE}, (True, False, False, False, False)),
        ({**TWIN, **MATCHED}, (False, False, False, False, True)),
        ({**EXACT, **NOISE}, (True, False, False, False, False)),
        ({**EXACT, **MATCHED}, (False, False, False, False, True)),
        ({"disturbance": {"staleness": 2}}, (True, False, False, False, False)),
        ({"disturbance": {"weights": "float16"}}, (True, False, False, False, False)),
        ({"disturbance": {"bias": 0.1}}, (True, False, False, False, False)),
        ({"disturbance": {"floor": 0.1}}, (True, False, False, False, False)),
    ],
)
def test_where_the_mismatch_comes_from(changes: dict[str, Any], places: tuple[bool, ...]) -> None:
    settings = arm_kinds.settings_of(results_of(arm=made(changes)), "arm")
    assert tuple(place(settings) for place in PLACES) == places


def test_every_cause_of_the_disturbance_is_known() -> None:
    assert {key for key in settings_of({})["disturbance"] if key != "side"} == {*arm_kinds.CAUSES}


def test_an_arm_with_a_setting_of_another_version_is_of_no_kind() -> None:
    results = results_of(old=made({"correction": {"weight": "mis"}}), new=made(NAIVE), clipped=made({"clip": CLIP}))
    assert arm_kinds.arms_as(results, arm_kinds.is_naive) == ["new", "clipped"]


def test_an_arm_without_a_recorded_disturbance_is_undisturbed() -> None:
    results = results_of(a=made(NAIVE))
    del results.runs["a"][0].record.settings["disturbance"]
    assert arm_kinds.has_own_mismatch(arm_kinds.settings_of(results, "a"))


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
    found = arm_kinds.ties(results)
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
    found = arm_kinds.ties(results)
    assert [tie[:2] for tie in found if tie[2] == "matched control"] == [("noisy", "both"), ("plain_noise", "plain")]


def test_claims_compare_a_quantised_engine_with_its_twin_by_mismatch_alone() -> None:
    scores = {"score": [0.5] * 4}
    results = results_of(
        exact=made(EXACT, **scores), bf16=made(NAIVE, **scores), fp8=made(FP8, **scores), twin=made(TWIN, **scores)
    )
    read = {claim: list(endpoints.pairs_of(CATALOGUE[claim], results)) for claim in HARM}
    assert read == {
        "vexact.a.score": [("bf16", "exact"), ("fp8", "exact")],
        "vexact.a.score.matched": [("fp8", "twin")],
    }


def test_a_policy_in_words() -> None:
    size = {"policy.source": "scratch", "policy.layers": 4, "policy.hidden_size": 128, "policy.vocabulary_size": 2048}
    assert arm_kinds.policy_name(size | {"policy.experts": None}) == "from scratch, 4 layers of 128, V = 2048"
    mixture = "from scratch, 4 layers of 128 with 16 experts, V = 2048"
    assert arm_kinds.policy_name(size | {"policy.experts": 16}) == mixture
    assert arm_kinds.policy_name({"policy.source": "pretrained", "policy.path": "x/y"}) == "x/y"
