"""The numbers behind the figures, each against a plain loop or a case small enough to do by hand."""

import math

import numpy as np
import pytest
from claims_fixture import run_of_metrics as run

from tailrl.reports.curves import curve, mean_of, moving_mean, window_of

NAN = math.nan


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_moving_mean_against_a_loop(window: int) -> None:
    values = np.random.default_rng(0).normal(size=7)
    values[2] = NAN
    around = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in range(7)]
    wanted = [NAN if i == 2 else np.nanmean(near) for i, near in enumerate(around)]
    np.testing.assert_allclose(moving_mean(values, window), np.array(wanted))


@pytest.mark.parametrize(("steps", "window"), [(1, 1), (39, 1), (40, 3), (60, 3), (100, 5), (1000, 51)])
def test_window_is_odd_and_about_a_twentieth(steps: int, window: int) -> None:
    assert window_of([run({"train/step": list(range(steps))})]) == window


def test_curve_over_seeds_with_different_steps_and_gaps() -> None:
    runs = [run({"train/step": [0, 1, 2], "a": [1, NAN, 3]}), run({"train/step": [0, 1, 3], "a": [3, NAN, 5]}, 1)]
    found = curve(runs, "a")
    np.testing.assert_array_equal(found.step_N, [0, 1, 2, 3])
    np.testing.assert_array_equal(found.mean_N, [2, NAN, 3, 5])
    np.testing.assert_array_equal(found.low_N, [1, NAN, 3, 5])
    np.testing.assert_array_equal(found.high_N, [3, NAN, 3, 5])
    assert next(found.rows()) == {
        "arm": "arm", "metric": "a", "step": 0, "mean": 2.0, "seed_min": 1.0, "seed_max": 3.0, "window": 1,
    }  # fmt: skip


def test_curve_of_lost_mass_and_of_an_absent_metric() -> None:
    runs = [run({"train/step": [0, 1], "z": [0.75, 1.0]})]
    lost = curve(runs, "z", lost=True)
    assert lost.metric == "1 - z"
    np.testing.assert_array_equal(lost.mean_N, [0.25, 0.0])
    assert np.isnan(curve(runs, "absent").mean_N).all()


def test_mean_of_the_last_steps_and_of_absent_metrics() -> None:
    runs = [run({"train/step": list(range(20)), "a": list(range(20))}), run({"train/step": [0], "a": [NAN]}, 1)]
    np.testing.assert_array_equal(mean_of(runs, "a", last=0.1), [18.5, NAN])
    np.testing.assert_array_equal(mean_of(runs, "a"), [9.5, NAN])
    assert np.isnan(mean_of(runs, "absent")).all()
