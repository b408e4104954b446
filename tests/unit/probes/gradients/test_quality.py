"""What the theorems say of the measured bias, at any size of model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tailrl.artifacts.probes import Quality
from tailrl.config.gradients import Gradients
from tailrl.objective.safe_set import safe_set
from tailrl.probes.gradients.enumeration import random_model, return_gradient, sampler_logits
from tailrl.probes.gradients.quality import measure, write_qualities
from tailrl.runtime.errors import StudyError
from tailrl.runtime.seeding import derive_seed

SIZES = {"models": 3, "vocabulary_size": 6, "length": 3, "prompts": 3, "group_size": 4, "draws": 20}
DOSES = {"noise": [0.5, 2.0], "floor": [0.3], "bias": [1.0]}
DVP = {"vocabulary": {"rule": "min_p", "rho": "e-3"}}
ARMS: dict[str, Any] = {
    "naive": {},
    "reinforce": {"estimator": "reinforce"},
    "dvp": DVP,
    "dvp_is": {**DVP, "correction": {"sequence": "is"}},
    "is": {"correction": {"sequence": "is"}},
}


def settings(arms: dict[str, Any], **sizes: Any) -> Gradients:
    return Gradients.model_validate({"arms": arms, "quality": {**SIZES, "doses": DOSES, **sizes}})


@pytest.fixture(scope="module")
def measured() -> list[Quality]:
    return list(measure(settings(ARMS)))


def of(measured: list[Quality], arm: str, *, mismatch: bool) -> list[Quality]:
    found = [q for q in measured if q.arm == arm and (q.mismatch != "none") == mismatch]
    assert len(found) == SIZES["models"] * (sum(map(len, DOSES.values())) if mismatch else 1)
    return found


@pytest.mark.parametrize("arm", ["naive", "reinforce"])
def test_without_mismatch_naive_is_unbiased_and_with_one_it_is_not(measured: list[Quality], arm: str) -> None:
    assert all(q.bias < 1e-10 and q.divergence == 0 for q in of(measured, arm, mismatch=False))
    assert all(q.bias > 1e-3 and q.divergence > 1e-3 for q in of(measured, arm, mismatch=True))


def test_without_mismatch_dvp_follows_its_own_objective(measured: list[Quality]) -> None:
    """Theorem 5.3: no bias for ∇J_mp; the bias for ∇J is what lies between the two."""
    for q in of(measured, "dvp", mismatch=False):
        seed = derive_seed("gradient model", 0, q.model)
        model = random_model(SIZES["vocabulary_size"], SIZES["length"], SIZES["prompts"], seed)
        whole, pruned = return_gradient(model), return_gradient(model, safe_set(model.logits_SV, "min_p", -3.0))
        assert q.bias_constrained < 1e-10
        assert q.bias == pytest.approx(((pruned - whole).norm() / whole.norm()).item(), rel=1e-9)
        assert q.bias > 1e-3


def test_whole_weights_on_all_tokens_are_unbiased_at_any_dose(measured: list[Quality]) -> None:
    assert all(q.bias < 1e-10 for q in of(measured, "is", mismatch=True))


def test_whole_weights_under_dvp_are_unbiased_where_the_sets_are_nested(measured: list[Quality]) -> None:
    """Theorem 5.3's condition V_S ⊆ V'_S, looked up for each model and dose: where it holds, and where it does not."""
    nested = {True: 0, False: 0}
    for q in of(measured, "dvp_is", mismatch=True):
        seed = derive_seed("gradient model", 0, q.model)
        model = random_model(SIZES["vocabulary_size"], SIZES["length"], SIZES["prompts"], seed)
        infer = sampler_logits(model.logits_SV, q.mismatch, q.dose, 0, q.model)
        holds = bool((safe_set(model.logits_SV, "min_p", -3.0) <= safe_set(infer, "min_p", -3.0)).all())
        nested[holds] += 1
        assert (q.bias_constrained < 1e-10) == holds == (q.lacking == 0)
    assert min(nested.values()) >= 3


def test_error_is_bias_and_deviation(measured: list[Quality]) -> None:
    for q in measured:
        assert q.error == pytest.approx(math.hypot(q.bias, q.deviation), rel=1e-12)
        assert -1 <= q.cosine <= 1 and 0 < q.cosine_half_width < 1
        assert q.direction >= q.cosine - q.cosine_half_width or q.mismatch != "none"


def test_the_weights_cost_variance(measured: list[Quality]) -> None:
    """Nothing where there is no mismatch; more than naive's where it is largest."""
    naive, weighted = (
        {(q.model, q.mismatch, q.dose): q.deviation for q in measured if q.arm == a} for a in ("naive", "is")
    )
    assert all(naive[m, "none", 0.0] == pytest.approx(weighted[m, "none", 0.0], rel=1e-12) for m in range(3))
    assert all(naive[m, "noise", 2.0] < weighted[m, "noise", 2.0] for m in range(3))


def test_an_arm_does_not_depend_on_the_others(measured: list[Quality]) -> None:
    alone = list(measure(settings({"dvp_is": ARMS["dvp_is"]})))
    assert alone == [q for q in measured if q.arm == "dvp_is"]


def test_a_one_token_vocabulary_has_no_gradient() -> None:
    """Its bias is all of ∇J, and against its own objective, which is flat, there is nothing to say."""
    for q in measure(settings({"one": {"vocabulary": {"rule": "top_k", "k": 1}}}, models=1)):
        assert (q.bias, q.deviation, q.cosine) == (pytest.approx(1), 0, 0)
        assert math.isnan(q.direction) and math.isnan(q.bias_constrained)


def test_an_impossible_threshold_is_refused() -> None:
    with pytest.raises(StudyError, match=r"arms\.a\.vocabulary: a rho of 9/V is above 1 for the 6 tokens"):
        next(measure(settings({"a": {"vocabulary": {"rule": "min_p", "rho": "9/V"}}})))


def test_a_model_without_anything_to_learn_is_refused() -> None:
    """One prompt and one token: some target is the digit of no head token, and no response is ever right."""
    sizes = {"models": 30, "vocabulary_size": 4, "length": 1, "prompts": 1}
    with pytest.raises(StudyError, match=r"gradient_quality: all responses of model \d+ have the same reward"):
        list(measure(settings({"naive": {}}, **sizes)))


def test_what_is_written(tmp_path: Path) -> None:
    few = settings({"one": {"vocabulary": {"rule": "top_k", "k": 1}}, "naive": {}}, models=1)
    write_qualities(few, tmp_path / "deep" / "out")
    lines = (tmp_path / "deep" / "out" / "quality.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["arm"] for row in rows] == ["one", "naive"] * 5
    assert rows[0]["direction"] is None and rows[1]["direction"] > 0.99
    run = json.loads((tmp_path / "deep" / "out" / "run.json").read_text(encoding="utf-8"))
    assert run["settings"]["quality"]["models"] == 1 and run["versions"]["torch"]
