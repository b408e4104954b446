"""Kinds of arms, by their settings."""

from typing import Any

import pytest
from claims_fixture import DVP, DVP_MIS, EXACT, MATCHED, NAIVE, NOISE, settings_of

from tailrl.config import arm_kinds
from tailrl.config.arm_kinds import KINDS
from tailrl.config.jobs import Run
from tailrl.config.sampler import Disturbance

CLIP = {"ratio": "recompute", "low": 0.2, "high": 0.2}
ROLES = (arm_kinds.is_naive, KINDS["dvp"], KINDS["dvp_mis"])


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
        (DVP, KINDS["dvp"]),
        ({**DVP, "correction": {"veto": 1e-4}}, KINDS["dvp"]),
        (DVP_MIS, KINDS["dvp_mis"]),
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
    run = Run.model_validate(settings_of(changes))
    assert [known for known in ROLES if known(run)] == ([role] if role else [])


VERIFIED = {"sampler": {"verify": True}}
FP8 = {"sampler": {"kv_cache_dtype": "fp8_e4m3"}}
TWIN = {"sampler": {**EXACT["sampler"], **FP8["sampler"]}}
INT4 = {"sampler": {"quantization": "int4", "group_size": 32}}
INT4_TWIN = {"sampler": {**EXACT["sampler"], **INT4["sampler"]}}
PLACES = (
    arm_kinds.is_mismatched,
    KINDS["own_mismatch"],
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
    run = Run.model_validate(settings_of(changes))
    assert tuple(place(run) for place in PLACES) == places


def test_every_cause_of_the_disturbance_is_known() -> None:
    assert Disturbance.model_fields.keys() - {"side"} == {*arm_kinds.CAUSES}
