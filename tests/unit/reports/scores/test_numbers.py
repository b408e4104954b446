"""Held-out scores of arms, and the pairs that a report compares."""

import math

import numpy as np
import pytest
from claims_fixture import DVP, DVP_MIS, EXACT, MATCHED, NAIVE, NOISE, around, made, results_of

from tailrl.artifacts.evaluation import ArmScores, Score
from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import flat_rows
from tailrl.reports import arm_pairs
from tailrl.reports.scores.numbers import by_problem, compare_arms, gains_over_base, greedy_differences, greedy_scores
from tailrl.stats.crossed import crossed_difference, crossed_gain, crossed_interval
from tailrl.stats.power import least_effect, seeds_needed
from tailrl.stats.tests import arm_difference, holm, paired_difference


def results(**correct: list[list[list[int]]]) -> Results:
    """Evaluations only: per arm and seed, the samples of each problem."""
    evaluations = {
        arm: ArmScores(arm, ("a", "b"), tuple(Score(i, np.array(s, float)) for i, s in enumerate(seeds)), "0")
        for arm, seeds in correct.items()
    }
    base = evaluations.pop("base")
    return Results(tuple(evaluations), {}, evaluations, base)


def test_gain_over_base() -> None:
    read = results(
        base=[[[0, 0], [1, 0]]], x=[[[1, 0], [1, 1]], [[1, 1], [1, 1]]], y=[[[0, 0], [1, 0]], [[1, 0], [0, 0]]]
    )
    x, y = gains_over_base(read)
    score_SP, base_P = np.array([[0.5, 1.0], [1.0, 1.0]]), np.array([0.0, 0.5])
    assert (x.avg, x.gain) == (crossed_interval(score_SP), crossed_gain(score_SP, base_P))
    assert x.avg.mean == pytest.approx((0.75 + 1.0) / 2)
    assert (x.passed.mean, x.gain.mean, x.avg_seeds.n) == (1.0, pytest.approx(0.625), 2)
    assert (x.single_min, x.single_max) == (0.5, 0.75)
    x_row, _ = flat_rows([x, y])
    assert [x_row[f"gain_{end}"] for end in ("low", "high")] == [x.gain.low, x.gain.high]
    assert [x.gain_p_holm, y.gain_p_holm] == holm([x.gain.p, y.gain.p]).tolist()


def test_greedy_scores_are_of_problems_that_were_right_before_and_others() -> None:
    """By hand: the untrained policy solves the first two of four problems."""
    greedy = {"base": [[1, 1, 0, 0]], "x": [[1, 0, 1, 1], [1, 1, 1, 0]], "y": [[0, 0, 0, 0], [1, 0, 0, 0]]}
    evaluations = {
        arm: ArmScores(
            arm,
            ("a", "b", "c", "d"),
            tuple(Score(i, np.zeros((4, 2)), greedy_P=np.array(own, float)) for i, own in enumerate(seeds)),
            "0",
        )
        for arm, seeds in greedy.items()
    }
    base = evaluations.pop("base")
    read = Results(tuple(evaluations), {}, evaluations, base)
    untrained, x, y = greedy_scores(read)
    assert (untrained.arm, untrained.greedy.mean, untrained.gain.mean) == ("base", 0.5, 0.0)
    assert (x.greedy.mean, x.kept, x.learnt) == (0.75, 0.75, 0.75)
    assert (y.greedy.mean, y.kept, y.learnt) == (0.125, 0.25, 0.0)
    of_x, base_P = np.array(greedy["x"], float), np.array(greedy["base"][0], float)
    assert (x.greedy, x.gain) == (crossed_interval(of_x), crossed_gain(of_x, base_P))
    assert [x.gain_p_holm, y.gain_p_holm] == holm([x.gain.p, y.gain.p]).tolist()
    pairs = [("x", "y", "naive"), ("y", "x", "no mismatch")]
    assert [(one.first, one.second, one.why) for one in greedy_differences(read, pairs)] == pairs
    first, second = greedy_differences(read, pairs)
    assert first.difference == crossed_difference(of_x, np.array(greedy["y"], float))
    assert first.difference.mean == pytest.approx(0.75 - 0.125) == pytest.approx(-second.difference.mean)
    assert [first.p_holm, second.p_holm] == holm([first.difference.p, second.difference.p]).tolist()
    lacking = ArmScores("y", base.problems, (Score(0, np.zeros((4, 2))),), "0")
    without = Results(("x", "y"), {}, {**evaluations, "y": lacking}, base)
    assert greedy_scores(without) == greedy_differences(without, pairs) == []


def study(**more: dict[str, object]) -> Results:
    """Naive and DVP with noise, with its matched control, and without mismatch."""
    arms = {
        "zero": {**EXACT},
        "naive": {**EXACT, **NOISE},
        "control": {**EXACT, **MATCHED},
        "dvp": {**EXACT, **NOISE, **DVP},
        "dvp_mis": {**EXACT, **NOISE, **DVP_MIS},
        **more,
    }
    scores = {"zero": 0.7, "naive": 0.5, "control": 0.6, "dvp": 0.65}
    return results_of(**{arm: made(changes, score=around(scores.get(arm, 0.6), 0.02)) for arm, changes in arms.items()})


def test_each_arm_is_compared_with_its_references() -> None:
    read = study(other={"sampler": {"engine": "transformers"}, "estimator": "grpo"})
    assert arm_pairs.references(read) == [
        ("naive", "control", "matched control"),
        ("naive", "zero", "no mismatch"),
        ("control", "zero", "no mismatch"),
        ("dvp", "naive", "naive"),
        ("dvp_mis", "naive", "naive"),
        ("other", "zero", "first arm"),
    ]


def test_arms_without_a_reference_are_compared_with_the_first() -> None:
    read = results_of(a=made(NAIVE), b=made({"estimator": "grpo"}), c=made({"estimator": "reinforce"}))
    assert arm_pairs.references(read) == [("b", "a", "first arm"), ("c", "a", "first arm")]
    assert arm_pairs.references(results_of(a=made(NAIVE))) == []


def test_reported_pairs_are_a_family_of_their_own_and_every_other_pair_is_in_the_table() -> None:
    read = study()
    found = compare_arms(read, arm_pairs.references(read))
    asked = [c for c in found if c.why]
    assert [(c.first, c.second, c.why) for c in asked] == arm_pairs.references(read)
    assert {frozenset((c.first, c.second)) for c in found} == {
        frozenset((a, b)) for a in read.arms for b in read.arms if a != b
    }
    assert len(found) == 10
    for kind in ("both", "seeds", "problems"):
        raw = [getattr(c, kind).p for c in found]
        adjusted = [getattr(c, f"{kind}_p_holm") for c in found]
        assert adjusted[: len(asked)] == holm(raw[: len(asked)]).tolist()
        assert adjusted[len(asked) :] == holm(raw).tolist()[len(asked) :]


def test_a_comparison_has_every_kind_of_error() -> None:
    read = study()
    compared = compare_arms(read, arm_pairs.references(read))
    (found, *_) = (c for c in compared if (c.first, c.second) == ("dvp", "naive"))
    first, second = (by_problem(read.evaluations[arm].scores) for arm in ("dvp", "naive"))
    assert found.both == crossed_difference(first, second)
    assert found.both.mean == pytest.approx(0.15)
    assert found.seeds == arm_difference(first.mean(axis=1), second.mean(axis=1))
    assert found.problems == paired_difference(first.mean(axis=0), second.mean(axis=0))
    seeds = first.mean(axis=1), second.mean(axis=1)
    assert (found.seeds_needed, found.least_seen) == (seeds_needed(*seeds), pytest.approx(least_effect(*seeds)))


def test_single_seeds_have_only_the_error_of_problems() -> None:
    read = results(base=[[[0, 0], [1, 0]]], x=[[[1, 1], [1, 0]]])
    (gain,) = gains_over_base(read)
    assert gain.gain.mean == 0.5 and math.isnan(gain.gain.low) and math.isnan(gain.gain_p_holm)
    assert not math.isnan(gain.single_low)
