"""The shapes of curves: made ones of known shape, and real small runs with one thing wrong (`curve_cases`)."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tailrl.curves.history import read_history
from tailrl.curves.reading import read_curves, shape_words
from tailrl.curves.shapes import shape_of

STEPS = np.arange(200.0)
CURVES = Path(__file__).parents[2] / "fixtures" / "curves"

MADE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat": lambda step: 0 * step + 1,
    "growth": lambda step: 1 + (step / 30) ** 2,
    "rise": lambda step: 1 + 5 * (1 - np.exp(-step / 8)),
    "fall": lambda step: np.exp(-step / 80),
    "jump": lambda step: np.where(step < 120, 1.0, 4.0),
    "drop": lambda step: np.where(step < 70, 3.0, 1.0),
    "spikes": lambda step: np.where(np.isin(step, [40, 41, 133]), 30.0, 1.0),
    "sawtooth": lambda step: 1 + step % 10,
}

RUNS = {
    "flat": "flat",
    "old_samples": "rise",
    "no_transfer": "growth",
    "rare_transfer": "sawtooth",
    "restart": "jump",
    "half_transfer": "spikes",
    "rate_zero": "growth_without_updates",
}
"""The causes of `benchmarks/curve_cases.py`, and the shape that tells them."""


@pytest.mark.parametrize("name", MADE)
def test_a_made_shape_is_told_under_noise(name: str) -> None:
    """20 curves with noise of 15 %, from one generator: none is taken for another shape."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        noise = np.exp(0.15 * generator.standard_normal(len(STEPS)))
        assert shape_of(STEPS, 1e-3 * MADE[name](STEPS) * noise).name == name


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_noise_alone_is_flat(noise: float) -> None:
    generator = np.random.default_rng(1)
    curves = [1e-3 * np.exp(noise * generator.standard_normal(len(STEPS))) for _ in range(100)]
    assert sum(shape_of(STEPS, curve).name != "flat" for curve in curves) <= 1


def test_where_and_by_how_much() -> None:
    jump = shape_of(STEPS, MADE["jump"](STEPS))
    assert (jump.since, jump.level, jump.factor) == (120, pytest.approx(1), pytest.approx(4))
    assert shape_of(STEPS, MADE["spikes"](STEPS)).spikes == (40, 41, 133)
    assert shape_of(STEPS, MADE["sawtooth"](STEPS)).period == 10
    growth = shape_of(STEPS, MADE["growth"](STEPS))
    # The medians of the first and the last twenty points of 1 + (s / 30)², on logarithms.
    log_N = np.log(MADE["growth"](STEPS))
    assert np.log(growth.factor) == pytest.approx(np.median(log_N[-20:]) - np.median(log_N[:20]))


def test_spikes_hide_no_growth() -> None:
    curve = MADE["growth"](STEPS) * np.where(STEPS == 50, 40, 1)
    found = shape_of(STEPS, curve)
    assert (found.name, found.spikes) == ("growth", (50,))


@pytest.mark.parametrize("factor", [1e-12, 1e6])
@pytest.mark.parametrize("name", MADE)
def test_a_shape_has_no_unit(name: str, factor: float) -> None:
    assert shape_of(STEPS, factor * MADE[name](STEPS)).name == name


def test_edges() -> None:
    assert shape_of(STEPS, 0 * STEPS).name == "zero"
    assert shape_of(STEPS, np.full(len(STEPS), np.nan)).name == "unknown"
    assert shape_of(np.empty(0), np.empty(0)).name == "unknown"
    assert shape_of(STEPS[:5], STEPS[:5] + 1).name == "short"
    with_gaps = np.where(STEPS % 7 == 3, np.nan, MADE["jump"](STEPS))
    assert shape_of(STEPS, with_gaps).name == "jump"
    assert math.isfinite(shape_of(STEPS, np.where(STEPS < 100, 0.0, 1.0)).factor)  # a 0 has no logarithm


@pytest.mark.parametrize("case", RUNS)
def test_the_cause_of_a_real_run_is_among_those_that_its_curve_allows(case: str) -> None:
    history = read_history(CURVES / f"{case}.jsonl")
    assert history is not None
    [run] = read_curves(history).runs
    assert run.shape == RUNS[case]
    causes = {
        "flat": "precision",
        "old_samples": "lag",
        "no_transfer": "arrival",
        "rare_transfer": "sync_period",
        "restart": "restart",
        "half_transfer": "transfer",
        "rate_zero": "engine_state",
    }
    assert causes[case] in shape_words().shapes[run.shape].fits


def test_every_shape_and_cause_has_words() -> None:
    words = shape_words()
    for shape in words.shapes.values():
        assert {*shape.fits, *shape.excludes} <= words.causes.keys()
        assert not {*shape.fits} & {*shape.excludes}
    used = {cause for shape in words.shapes.values() for cause in shape.fits}
    assert used == words.causes.keys()
    assert {*MADE, *RUNS.values(), "zero", "unknown", "short"} <= words.shapes.keys()


LEAVES: dict[str, tuple[np.ndarray, float, float]] = {
    "its last three points": (np.where(STEPS >= 197, 1000.0, 1.0), 197, 199),
    "its last twentieth grows": (np.where(STEPS >= 190, 1.5 ** (STEPS - 189), 1.0), 191, 199),
    "its last tenth": (np.where(STEPS >= 181, 1000.0, 1.0), 181, 199),
    "its middle": (np.where((STEPS >= 80) & (STEPS < 120), 500.0, 1.0), 80, 119),
    "zero from the middle on": (np.where(STEPS >= 100, 0.0, 1.0), 100, 199),
    "zero at the beginning": (np.where(STEPS < 3, 0.0, 1.0), 0, 2),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_curve_that_leaves_its_size_for_a_while_is_not_flat(name: str) -> None:
    """Whatever no other shape names is flat only if every stretch of it has the curve's own size."""
    values, first, last = LEAVES[name]
    noise = np.exp(0.1 * np.random.default_rng(3).standard_normal(len(STEPS)))
    shape = shape_of(STEPS, 1e-3 * values * noise)
    assert shape.name == "uneven" and not shape_words().shapes["uneven"].excludes
    assert abs(shape.since - first) <= 1 and abs(shape.until - last) <= 1
