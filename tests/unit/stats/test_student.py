"""Student's t and the intervals that are made of it, beside SciPy's."""

import pytest
from scipy import stats

from tailrl.stats.intervals import share_interval
from tailrl.stats.student import t_cdf, t_quantile


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 15, 63, 999, 20_000])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.975, 0.995, 0.9999])
def test_the_quantile_is_scipys(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-10)


@pytest.mark.parametrize("t", [-30.0, -2.0, -0.1, 0.0, 0.3, 1.96, 8.0])
def test_the_distribution_is_scipys(t: float) -> None:
    for df in (1, 2.5, 10, 400):
        assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 200])
def test_wilsons_interval_is_scipys(n: int) -> None:
    for count in {0, 1, n // 2, n - 1, n}:
        expected = stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
        interval = share_interval(count, n)
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
