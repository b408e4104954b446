"""The claims about whole distributions: each outcome, from synthetic numbers."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tailrl.claims.finding import CONTRADICTED, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.config.load import parse_study
from tailrl.reports.distributions.endpoints import BOUND, EQUAL, MODE, NESTED, SECOND, SIGN, judge_distributions
from tailrl.reports.distributions.numbers import Compared
from tailrl.stats.intervals import ratio_interval

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
