"""Whether the mismatch changes over the steps of a log."""

from dataclasses import replace

import numpy as np
import pytest
from diagnosis_fixture import noisy_rows

from tailrl.diagnosis.causes import Cause
from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import Measured, measure
from tailrl.diagnosis.trend import trend_of


def of_steps(noises: list[float], seed: int = 0) -> list[LoggedRow]:
    rows = []
    for step, noise in enumerate(noises):
        made = noisy_rows(12, 40, noise, seed=seed + step)
        rows += [replace(row, step=float(step), again_T=None) for row in made]
    return rows


def measured_of(noises: list[float], seed: int = 0) -> Measured:
    return measure([("", pack(of_steps(noises, seed)))])


def test_growth_is_told_with_both_ends() -> None:
    measured = measured_of([0.02, 0.02, 0.05, 0.1, 0.2, 0.2])
    trend = trend_of(measured)
    assert trend is not None and trend.grows
    size_S, tokens_S, step_S = (measured.column(name) for name in ("abs_logp", "tokens", "step"))
    expected = [size_S[chosen].sum() / tokens_S[chosen].sum() for chosen in (step_S <= 1, step_S >= 4)]
    assert (trend.first, trend.last) == pytest.approx(expected)
    assert trend.sentence().startswith("It grows with the steps: mean |Δ| is 0.0")
    assert "weights that do not reach the engine" in trend.sentence()


def test_a_fall_has_no_causes_of_growth() -> None:
    trend = trend_of(measured_of([0.2, 0.2, 0.1, 0.05, 0.02, 0.02]))
    assert trend is not None and not trend.grows
    assert trend.sentence().startswith("It falls") and "reach the engine" not in trend.sentence()


def test_a_level_that_stays_is_no_trend() -> None:
    assert not [seed for seed in range(0, 200, 10) if trend_of(measured_of([0.05] * 6, seed))]


def test_a_small_growth_is_no_trend() -> None:
    """By a quarter, over enough tokens for an interval above 0."""
    rows = [row for copy in range(8) for row in of_steps([0.05, 0.05, 0.055, 0.06, 0.0625, 0.0625], 10 * copy)]
    measured = measure([("", pack(rows))])
    size_S, tokens_S, step_S = (measured.column(name) for name in ("abs_logp", "tokens", "step"))
    early, late = (size_S[chosen].sum() / tokens_S[chosen].sum() for chosen in (step_S <= 1, step_S >= 4))
    assert 1.15 < late / early < 1.5
    assert trend_of(measured) is None


def test_few_steps_tell_none() -> None:
    assert trend_of(measured_of([0.02, 0.2])) is None
    rows = [replace(row, step=np.nan) for row in of_steps([0.02, 0.1, 0.2])]
    assert trend_of(measure([("", pack(rows))])) is None


def test_growth_is_not_put_down_to_rounding() -> None:
    """Beyond the size of 16 bits; a small growth within it needs nothing."""
    causes = (Cause("precision", 0.9, ()),)
    grown, level, small = (
        replace(diagnose_parts([("", pack(of_steps(noises)))]), causes=causes).advice
        for noises in ([0.02, 0.02, 0.1, 0.3, 0.4, 0.4], [0.2] * 6, [0.005, 0.005, 0.01, 0.02, 0.02, 0.02])
    )
    assert grown.kind == "fix" and "Compare a checksum" in grown.words
    assert level.kind == "ask" and small.kind == "none"
