"""The gate on curves: the median of the last tenth, with its interval, for each run."""

import numpy as np
import pytest
from scipy import stats

from tailrl.curves.gate import judge_curves, median_interval
from tailrl.curves.history import Curve, History
from tailrl.curves.reading import Reading, read_curves
from tailrl.diagnosis.gate import BEYOND, CANNOT_TELL, WITHIN, read_limits

STEPS = np.arange(200.0)


def reading(**runs: np.ndarray) -> Reading:
    curves = tuple(Curve(run, "rollout_corr/k3_kl", STEPS, values) for run, values in runs.items())
    return read_curves(History("m.csv", "a W&B export", curves, {}))


def test_each_run_is_judged_at_its_end() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.05, len(STEPS))
    told = reading(good=noise * 1e-3, grown=noise * np.where(STEPS < 100, 1e-3, 1e-2))
    found = judge_curves(told, read_limits(["k3=2e-3", "rollout_corr/k3_kl=2e-2"], []))
    assert [one.code for one in found] == [WITHIN, BEYOND, WITHIN, WITHIN]
    assert found[1].words.startswith("grown: k3 is 0.0099 [")
    (edge, _) = judge_curves(told, read_limits([f"k3={np.median(noise[-20:]) * 1e-3}"], []))
    assert edge.code == CANNOT_TELL


def test_a_number_that_is_not_logged_cannot_be_told() -> None:
    [found] = judge_curves(reading(one=np.full(200, 1e-3)), read_limits(["abs_logp=1"], []))
    assert found.code == CANNOT_TELL and found.words == "one: abs_logp is not among the curves: rollout_corr/k3_kl."


@pytest.mark.parametrize("count", [6, 7, 20, 51])
def test_the_interval_of_a_median(count: int) -> None:
    """Coverage of at least 95 %, exactly, by the binomial distribution; the next narrower one has less."""
    found = median_interval(np.arange(count, dtype=float))
    cut = int(found.low)
    assert found.high == count - 1 - cut
    coverage = 1 - 2 * stats.binom.cdf(cut, count, 0.5)
    assert coverage >= 0.95 > 1 - 2 * stats.binom.cdf(cut + 1, count, 0.5)


def test_few_values_have_no_interval() -> None:
    assert np.isnan(median_interval(np.arange(5.0)).low) and median_interval(np.array([])).n == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.where(STEPS > 150, np.nan, 1e-3), "20 of the last 20 steps are NaN or infinite"),
        (np.where(STEPS == 190, np.inf, 1e-3), "1 of the last 20 steps are NaN or infinite"),
        (np.where(STEPS >= 197, 1.0, 1e-3), "In the last 3 steps k3 is 1: beyond"),
        (np.full(200, -0.1), "it is never below 0"),
    ],
)
def test_an_end_that_is_no_number_or_blows_up_is_never_within(values: np.ndarray, words: str) -> None:
    [found] = judge_curves(reading(one=values), read_limits(["k3=0.01"], []))
    assert found.code == CANNOT_TELL and words in found.words
