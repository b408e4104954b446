"""The claims about exact gradients and whole distributions: each outcome, from synthetic numbers."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tailrl.claims.finding import ASIDE, CONTRADICTED, NOT_SEEN, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.config.arm import Arm
from tailrl.config.load import parse_study
from tailrl.reports.distributions.endpoints import BOUND, EQUAL, MODE, NESTED, SECOND, SIGN, judge_distributions
from tailrl.reports.distributions.numbers import Compared
from tailrl.reports.gradients.endpoints import BIASED, CONSTRAINED, TRADED, UNBIASED, judge_gradients
from tailrl.reports.gradients.numbers import Range, Summary
from tailrl.stats.intervals import ratio_interval

ARMS = {
    "plain": {},
    "grpo": {"estimator": "grpo"},
    "safe_is": {"vocabulary": {"rule": "min_p", "rho": "e-5"}, "correction": {"sequence": "is"}},
    "is": {"correction": {"sequence": "is"}},
    "mis": {"correction": {"sequence": "mis"}},
}
SETTINGS = {name: Arm.model_validate(arm) for name, arm in ARMS.items()}
ZERO = 1e-15


def summary(
    arm: str, mismatch: str, dose: float, bias: float, constrained: float, deviation: float = 1.0,
    nested: tuple[int, float] | None = None,
) -> Summary:  # fmt: skip
    """Values of models that lie a fifth apart on either side; the sets are nested in all of them, or in so many."""

    def around(value: float) -> Range:
        return Range(value, 0.8 * value, 1.2 * value)

    one = around(1.0)
    biases = around(bias), around(constrained)
    kept = nested or (12, biases[1].high)
    return Summary(
        mismatch, dose, arm, 12, 0, *kept, 0.01, one, *biases, one, one, one, one, around(deviation), one, one
    )


def gradients(**biases: tuple[float, float, float]) -> list[Summary]:
    """Of each arm: the bias without mismatch, and at two doses of noise."""
    doses = (("none", 0.0), ("noise", 0.1), ("noise", 1.0))
    spread = {"is": 3.0}
    return [
        summary(arm, *dose, bias, bias, spread.get(arm, 1.0))
        for arm, own in biases.items()
        for dose, bias in zip(doses, own, strict=True)
    ]


def outcomes(claim: str, **biases: tuple[float, float, float]) -> list[str]:
    return [line.verdict for line in judge_gradients(gradients(**biases), SETTINGS) if line.id == claim]


@pytest.mark.parametrize(
    ("claim", "biases", "expected"),
    [
        (UNBIASED, {"plain": (ZERO, 0.1, 1.0)}, [REPRODUCED]),
        (UNBIASED, {"plain": (1e-6, 0.1, 1.0)}, [CONTRADICTED]),
        (BIASED, {"plain": (ZERO, 0.1, 1.0)}, [REPRODUCED]),
        (BIASED, {"plain": (ZERO, 0.1, 0.05)}, [CONTRADICTED]),  # it does not grow
        (BIASED, {"plain": (ZERO, ZERO, 0.1)}, [CONTRADICTED]),
        (CONSTRAINED, {"safe_is": (ZERO, ZERO, ZERO)}, [REPRODUCED, REPRODUCED]),
        (CONSTRAINED, {"safe_is": (ZERO, ZERO, 0.1)}, [REPRODUCED, CONTRADICTED]),
        (TRADED, {"is": (ZERO, ZERO, ZERO), "mis": (ZERO, 0.1, 0.5)}, [REPRODUCED]),
        (TRADED, {"is": (ZERO, ZERO, ZERO), "mis": (ZERO, ZERO, ZERO)}, [NOT_SEEN]),
        (BIASED, {"grpo": (ZERO, 0.1, 1.0)}, []),  # another estimator
    ],
)
def test_exact_gradients(claim: str, biases: dict[str, Any], expected: list[str]) -> None:
    assert outcomes(claim, **biases) == expected


def test_a_flat_objective_says_nothing_of_the_theorem() -> None:
    lines = [summary("safe_is", "none", 0.0, ZERO, math.nan, nested=(12, math.nan))]
    (line,) = [line for line in judge_gradients(lines, SETTINGS) if line.id == CONSTRAINED]
    assert (line.verdict, line.seen) == (UNTESTABLE, "J_mp is flat in every model")


@pytest.mark.parametrize(
    ("nested", "verdict", "seen"),
    [
        (
            (5, ZERO),
            ASIDE,
            "in models where V_S ⊄ V'_S; of 1.2e-15 at most in those where it holds, 5 to 12 of 12 models by the dose",
        ),
        ((0, math.nan), ASIDE, "bias against ∇J_mp of up to 0.12 |∇J_mp| in models where V_S ⊄ V'_S"),
        ((5, 0.01), CONTRADICTED, "bias against ∇J_mp of up to 0.12 |∇J_mp|"),
    ],
)
def test_a_theorem_is_set_aside_if_its_premise_fails(nested: tuple[int, float], verdict: str, seen: str) -> None:
    lines = [
        summary("safe_is", "none", 0.0, ZERO, ZERO),
        summary("safe_is", "noise", 0.1, ZERO, ZERO),
        summary("safe_is", "noise", 1.0, 0.1, 0.1, nested=nested),
    ]
    own = [line for line in judge_gradients(lines, SETTINGS) if line.id == CONSTRAINED]
    assert [line.verdict for line in own] == [REPRODUCED, verdict]
    assert seen in own[1].seen and "nan" not in own[1].seen


def test_lines_have_their_scope() -> None:
    lines = judge_gradients(gradients(plain=(ZERO, 0.1, 1.0)), SETTINGS)
    (line,) = [line for line in lines if line.id == BIASED]
    assert (line.arms, line.seeds, line.effect) == ("plain", 12, 1.0)
    assert line.dose == "noise σ on every logit (nats)"
    assert line.seen == "its bias is 0.1 at 0.1 to 1 at 1 |∇J|, above rounding in all 12 models at every dose"


PLACES = 200


def compared(engine: str = "coarse", *, settings: dict[str, Any] | None = None, **changes: Any) -> Compared:
    """An engine whose Δ of the sampled token is half of what Prop. 4.2 allows, and whose tail has −Δ around 0."""
    rng = np.random.default_rng(0)
    logp_train_P = np.log(rng.uniform(0.1, 0.9, PLACES))
    half_range_P = np.full(PLACES, 0.02)
    arrays: dict[str, Any] = {
        "problem_P": np.arange(PLACES) // 2,
        "logp_train_P": logp_train_P,
        "logp_infer_P": logp_train_P + half_range_P * -np.expm1(logp_train_P),
        "half_range_P": half_range_P,
        "delta_max_P": np.full(PLACES, 0.03),
        "kept_train_PS": np.full((PLACES, 1), 10),
        "kept_both_PS": np.full((PLACES, 1), 10),
        "mass_PB": np.tile([0.9, 0.1], (PLACES, 1)),
        "signed_PB": np.column_stack([np.zeros(PLACES), 0.1 * rng.normal(0, 0.01, PLACES)]),
        "paper_PB": np.tile([0.5, 0.1 * 0.005], (PLACES, 1)),
        "second_PB": np.tile([0.5, 0.1 * 0.0001], (PLACES, 1)),
    }
    study = parse_study(
        {"name": "s", "arms": {"a": {}}, "distributions": {"rho": ["e-13"], "engines": {engine: settings or {}}}}
    )
    job = study.compared(engine).model_dump(mode="json")
    return Compared(engine, {"settings": job, "edges": [0.0, 5.0], "tail_from": 5.0}, arrays | changes)


def verdict(claim: str, *engines: Compared) -> list[tuple[str, str]]:
    return [(line.arms, line.verdict) for line in judge_distributions(engines) if line.id == claim]


def test_the_bound_is_a_fact() -> None:
    fine = compared()
    assert verdict(BOUND, fine) == [("coarse", REPRODUCED)]
    over = fine.arrays["logp_infer_P"].copy()
    over[7] = fine.arrays["logp_train_P"][7] + 2.1 * 0.02 * -np.expm1(fine.arrays["logp_train_P"][7])
    (line,) = [line for line in judge_distributions([compared(logp_infer_P=over)]) if line.id == BOUND]
    assert (line.verdict, line.effect) == (CONTRADICTED, 1 / PLACES)
    assert line.seen == f"1 of {PLACES} sampled tokens exceed it, by 5 % at most"


def test_the_sign_is_tested_over_problems() -> None:
    fine = compared()
    signed_PB = fine.arrays["signed_PB"]
    assert verdict(SIGN, fine) == [("coarse", UNDECIDED)]
    assert verdict(SIGN, compared(signed_PB=signed_PB + np.array([0.0, 0.001]))) == [("coarse", REPRODUCED)]
    assert verdict(SIGN, compared(signed_PB=signed_PB - np.array([0.0, 0.001]))) == [("coarse", CONTRADICTED)]
    assert verdict(SIGN, compared(mass_PB=np.tile([1.0, 0.0], (PLACES, 1)))) == [("coarse", UNTESTABLE)]
    (line,) = [line for line in judge_distributions([fine]) if line.id == SIGN]
    expected = ratio_interval(signed_PB[:, 1], np.full(PLACES, 0.1), np.arange(PLACES) // 2)
    assert (line.effect, line.low, line.high) == (expected.mean, expected.low, expected.high)
    assert "nan" not in line.seen


def test_the_tail_begins_where_the_record_says() -> None:
    fine, wide = compared(), compared()
    wide.record["tail_from"] = 0.0
    (line,) = [line for line in judge_distributions([wide]) if line.id == SIGN]
    signed_PB = fine.arrays["signed_PB"]
    assert line.effect == pytest.approx(signed_PB.sum() / fine.arrays["mass_PB"].sum())
    assert line.effect != pytest.approx(signed_PB[:, 1].sum() / fine.arrays["mass_PB"][:, 1].sum())


def test_a_single_problem_is_no_test() -> None:
    """It has no interval, no p, and no place in the family of the others."""
    fine, single = compared(), compared("single", problem_P=np.zeros(PLACES, int))
    lines = {line.arms: line for line in judge_distributions([fine, single]) if line.id == MODE}
    (alone,) = [line for line in judge_distributions([fine]) if line.id == MODE]
    assert lines["coarse"].p_holm == alone.p_holm
    for line in (lines["single"], *(x for x in judge_distributions([single]) if x.id == SIGN)):
        assert math.isnan(line.p) and math.isnan(line.p_holm) and line.verdict == UNDECIDED


def test_the_size_agrees_with_the_prediction_or_differs() -> None:
    """Whichever way it differs; of the tail alone."""
    fine = compared()
    assert verdict(MODE, fine) == [("coarse", CONTRADICTED)]
    assert verdict(SECOND, fine) == [("coarse", UNDECIDED)]
    assert verdict(SECOND, compared(second_PB=-fine.arrays["paper_PB"])) == [("coarse", CONTRADICTED)]
    assert verdict(MODE, compared(mass_PB=np.tile([1.0, 0.0], (PLACES, 1)))) == []
    (line,) = [line for line in judge_distributions([fine]) if line.id == MODE]
    apart_P = (fine.arrays["signed_PB"] - fine.arrays["paper_PB"])[:, 1]
    expected = ratio_interval(apart_P, np.full(PLACES, 0.1), np.arange(PLACES) // 2)
    assert (line.effect, line.low, line.high) == (expected.mean, expected.low, expected.high)
    t = stats.ttest_1samp(apart_P.reshape(-1, 2).mean(axis=1), 0.0)
    assert line.p == pytest.approx(t.pvalue, rel=1e-6) and line.p_holm == pytest.approx(2 * t.pvalue, rel=1e-6)
    assert line.seen.endswith("predicted 0.005 [0.005, 0.005] nats")


def test_sets_and_equality_are_facts() -> None:
    exact = {"settings": {"sampler": {"engine": "exact", "dtype": "float32"}}}
    fine, same = compared(), compared("exact", **exact, delta_max_P=np.zeros(PLACES))
    lacking = np.full((PLACES, 1), 10)
    lacking[:3] = 9
    assert verdict(NESTED, fine, compared("other", kept_both_PS=lacking)) == [
        ("coarse", REPRODUCED),
        ("other", CONTRADICTED),
    ]
    assert verdict(EQUAL, fine, same) == [("exact", REPRODUCED)]
    assert verdict(EQUAL, compared("nearly", **exact)) == [("nearly", CONTRADICTED)]
    assert verdict(BOUND, same) == verdict(SIGN, same) == []  # nothing differs
    assert judge_distributions([compared("floor", settings={"rescored": 1})]) == []  # no engine


def test_at_equal_k3_a_dose_is_no_dose_of_its_kind() -> None:
    lines = judge_gradients(gradients(plain=(ZERO, 0.1, 1.0)), SETTINGS, equal=True)
    assert any("k3 per token (nats)" in line.dose for line in lines)
    assert not any("k3" in line.dose for line in judge_gradients(gradients(plain=(ZERO, 0.1, 1.0)), SETTINGS))
