"""Alarms: the definition against a loop, and the edges."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrl.tracking.metrics import METRICS, SIGNALS, SKEW
from tailrl.training.stopping import WINDOW, alarm_step, signal, start_steps

NAN = math.nan


def by_loop(values: list[float], factor: float, start: int) -> int | None:
    """Step by step, as a run sees it."""
    level = [v for v in values[:start] if not math.isnan(v)]
    for step in range(start, len(values)):
        recent = [v for v in values[max(0, step - WINDOW + 1) : step + 1] if not math.isnan(v)]
        if any(level) and recent:
            mean, limit = sum(recent) / len(recent), factor * sum(level) / len(level)
            if not math.isclose(mean, limit, rel_tol=1e-9) and (mean > limit) == (factor > 1):
                return step
    return None


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(NAN), st.integers(0, 50).map(float)), max_size=30),
    st.sampled_from([0.3, 0.7, 1.5, 3.1]),
    st.integers(1, 12),
)
def test_an_alarm_is_the_first_step_beyond(values: list[float], factor: float, start: int) -> None:
    # Whole numbers and these factors: a mean is at the limit exactly or clearly apart from it.
    expected = by_loop(values, factor, start)
    found = alarm_step(values, factor, start)
    level = np.nanmean(values[:start]) if any(not math.isnan(v) for v in values[:start]) else NAN
    if found != expected:  # rounding at the limit alone may part the two
        step = min(s for s in (found, expected) if s is not None)
        recent = np.nanmean(values[max(0, step - WINDOW + 1) : step + 1])
        assert recent == pytest.approx(factor * level, rel=1e-9)


def test_the_steps_of_the_level_raise_none_and_later_ones_do() -> None:
    assert alarm_step([1.0] * 5 + [100.0], 3.0, 5) == 5
    assert alarm_step([1.0, 100.0, 1.0, 1.0, 1.0], 3.0, 5) is None
    assert alarm_step([1.0] * 10 + [0.1] * 5, 0.5, 5) == 12  # mean of 1, 1, 0.1, 0.1, 0.1
    assert alarm_step([0.0] * 10, 3.0, 5) is None  # no mismatch at all
    assert alarm_step([0.0] * 9 + [1e-9], 3.0, 5) is None  # of no level there is no multiple
    assert alarm_step([NAN] * 20, 3.0, 5) is None
    assert alarm_step([], 3.0, 5) is None
    assert alarm_step([1.0] * 5 + [NAN] * 5, 0.5, 5) is None


def test_an_alarm_does_not_depend_on_what_comes_later() -> None:
    values = np.abs(np.random.default_rng(0).normal(size=60)) * np.linspace(1, 5, 60)
    whole = alarm_step(values, 2.0, 6)
    assert whole is not None
    assert [alarm_step(values[:n], 2.0, 6) for n in (whole, whole + 1, 60)] == [None, whole, whole]


@pytest.mark.parametrize(("steps", "start"), [(1, 5), (50, 5), (51, 6), (150, 15), (2000, 200)])
def test_the_level_is_that_of_a_tenth(steps: int, start: int) -> None:
    assert start_steps(steps) == start


def test_signals() -> None:
    step = {"train/grad_norm": -2.0, "policy/entropy": None}
    step |= {"rollout_corr/c_positive_advantage": -0.5, "rollout_corr/c_negative_advantage": 0.2}
    assert signal(step, "train/grad_norm") == 2.0
    assert signal(step, SKEW) == pytest.approx(0.3)
    assert math.isnan(signal(step, "policy/entropy")) and math.isnan(signal(step, "reward/mean"))
    assert set(SIGNALS) == {*METRICS, SKEW}
