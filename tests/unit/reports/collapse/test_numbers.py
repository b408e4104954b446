"""Collapse of runs, as rows and as a figure."""

import math

import numpy as np
import pytest
from claims_fixture import NAIVE, STEPS, falling, made, results_of

from tailrl.reports.collapse.numbers import collapses, deepest_loss, run_collapses, survival_curve
from tailrl.reports.collapse.page import survival_figure
from tailrl.stats.survival import survival

pytestmark = pytest.mark.filterwarnings("error")


def test_collapse_has_the_steps_own_number() -> None:
    # The trailing mean of 5 steps is below half of 0.5 once three of them are 0.
    runs = results_of(a=made(NAIVE, reward=falling(20, None))).runs["a"]
    assert collapses(runs) == ([23, None], [STEPS, STEPS])


def test_steps_without_a_reward_are_left_out_and_runs_without_any() -> None:
    gap = falling(20)[0]
    gap[10:15] = [math.nan] * 5
    runs = results_of(a=made(NAIVE, reward=[gap, math.nan])).runs["a"]
    assert collapses(runs) == ([23], [STEPS])
    assert collapses(results_of(a=made(NAIVE)).runs["a"]) == ([], [])


def test_a_run_whose_problems_become_harder_tells_no_collapse() -> None:
    results = results_of(a=made(NAIVE, reward=falling(20, None), level=[1, 2]), b=made(NAIVE, reward=falling(20)))
    assert collapses(results.runs["a"]) == ([], [])
    (row,) = survival_curve("a", results.runs["a"])
    assert (row.runs, row.collapsed) == (0, 0) and math.isnan(row.share)
    assert collapses(results.runs["b"]) == ([23], [STEPS])
    only = survival_figure(results_of(a=made(NAIVE, reward=falling(20), level=[1])))
    assert [text.get_text() for text in only.axes[0].texts] == ["No run can tell a collapse."]


def test_deepest_loss() -> None:
    rewards = [[0.2] * 10 + [0.8] * 10 + [0.6] * 30, [0.5] * 50, [0.0] * 50, [math.nan] * 48 + [0.9, 0.1]]
    assert deepest_loss(results_of(a=made(NAIVE, reward=rewards)).runs["a"]) == pytest.approx(0.25)
    assert deepest_loss(results_of(a=made(NAIVE, reward=[0.0])).runs["a"]) == 0
    assert math.isnan(deepest_loss(results_of(a=made(NAIVE)).runs["a"]))


def test_each_run_says_when_it_collapsed_and_how_far_its_reward_fell() -> None:
    falls = falling(20, None)
    results = results_of(a=made(NAIVE, reward=falls), b=made(NAIVE, reward=falling(20), level=[1]), c=made(NAIVE))
    found = list(run_collapses(results))
    (one, other), (harder, unknown) = found[:2], (next(run for run in found if run.arm == arm) for arm in "bc")
    assert (one.arm, one.seed, one.steps, one.collapse) == ("a", 0, STEPS, 23)
    assert one.best == pytest.approx(np.mean(falls[0][15:20])) and one.end == pytest.approx(np.mean(falls[0][-5:]))
    assert (other.seed, other.best, other.end) == (1, pytest.approx(max(falls[1])), pytest.approx(falls[1][-1]))
    assert math.isnan(other.collapse) and math.isnan(harder.collapse)
    assert harder.end < harder.best and math.isnan(unknown.best)


def test_rows_are_kaplan_and_meiers_steps() -> None:
    results = results_of(a=made(NAIVE, reward=falling(20, 30, None, 30)), b=made(NAIVE, reward=falling(None)))
    first, *events = survival_curve("a", results.runs["a"])
    assert (first.step, first.share, first.runs, first.collapsed) == (0, 1.0, 4, 3)
    (alive,) = survival_curve("b", results.runs["b"])
    assert (alive.arm, alive.step, alive.share, alive.runs, alive.collapsed) == ("b", 0, 1.0, 1, 0)
    curve = survival([23, 33, None, 33], [STEPS] * 4)
    assert [row.step for row in events] == curve.step_E.tolist()
    for column, expected in (("share", curve.share_E), ("low", curve.low_E), ("high", curve.high_E)):
        np.testing.assert_array_equal([getattr(row, column) for row in events], expected)


def test_the_figure_draws_every_arm_or_says_that_no_run_collapsed() -> None:
    some = results_of(
        a=made(NAIVE, reward=falling(20, 30, None)),
        b=made(NAIVE, reward=falling(None, None)),
        c=made(NAIVE, reward=falling(10, 10)),
        d=made(NAIVE),
    )
    (ax,) = survival_figure(some).axes
    drawn = [line.get_xydata().tolist() for line in ax.lines[::2]]
    assert drawn[0] == [[0, 1], [23, pytest.approx(2 / 3)], [33, pytest.approx(1 / 3)], [STEPS, pytest.approx(1 / 3)]]
    assert drawn[1] == [[0, 1], [STEPS, 1]]
    assert drawn[2] == [[0, 1], [13, 0], [STEPS, 0]]
    assert np.isnan(np.array(drawn[3])[:, 1]).all()  # nothing is known of d
    for curve, marks in zip(drawn[:3], ax.lines[1::2], strict=False):
        at = marks.get_xydata()[list(marks.get_markevery())]
        assert len(at) >= 5 and {step for step, _ in curve[:-1]} <= set(marks.get_xdata())
        assert all(share == [height for step, height in curve if step <= place][-1] for place, share in at)
    assert not np.isfinite(ax.lines[7].get_ydata()).any()
    (ax,) = survival_figure(results_of(b=made(NAIVE, reward=falling(None, None)))).axes
    assert not ax.lines
    assert [text.get_text() for text in ax.texts] == ["No run of this study collapsed."]
