"""The numbers behind the figures, each against a plain loop or a case small enough to do by hand."""

import csv
import itertools
import math
from dataclasses import make_dataclass
from pathlib import Path

import numpy as np
import pytest
from claims_fixture import run_of_metrics as run
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.artifacts.tokens import Tokens
from tailrl.reports.course.numbers import time_shares
from tailrl.reports.curves import curve, mean_of, moving_mean, window_of
from tailrl.reports.mismatch.numbers import NATS, delta_bins
from tailrl.reports.scores.numbers import PolicyScore
from tailrl.stats.intervals import Interval
from tailrl.stats.tests import paired_difference

NAN = math.nan


def kept(step_T: NDArray[np.int32], train_T: FloatArray, infer_T: FloatArray) -> Tokens:
    """Tokens of one response a step."""
    return Tokens(step_T, train_T, infer_T, np.zeros(len(step_T), dtype=np.int32))


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


def test_delta_bins_against_a_loop() -> None:
    rng = np.random.default_rng(1)
    train, infer = -rng.exponential(4, 500), -rng.exponential(4, 500)
    train[:3], train[3] = [1e-7, 0.0, -20.0], -math.inf
    step = rng.integers(0, 5, 500).astype(np.int32)
    half = [run({}, seed, kept(step[p], train[p], infer[p])) for seed, p in enumerate((slice(250), slice(250, 500)))]
    bins = delta_bins(half)
    assert [(b.nats_from, b.nats_to) for b in bins] == list(itertools.pairwise(NATS))
    assert sum(b.tokens for b in bins) == 499
    for b in bins:
        low = -math.inf if b.nats_from == 0 else b.nats_from
        inside = [i for i in range(500) if low <= -train[i] < b.nats_to and math.isfinite(train[i])]
        assert b.tokens == len(inside)
        assert b.clusters == len({(i < 250, step[i]) for i in inside})
        assert b.size == pytest.approx(np.mean([abs(train[i] - infer[i]) for i in inside]))
        assert b.signed == pytest.approx(np.mean([infer[i] - train[i] for i in inside]))
        assert b.size_low < b.size < b.size_high


def test_delta_bin_without_tokens() -> None:
    tokens = kept(np.zeros(2, dtype=np.int32), np.array([-0.05, -0.05]), np.array([-0.05, -0.05]))
    bins = delta_bins([run({}, 0, tokens)])
    assert (bins[0].tokens, bins[0].size) == (2, 0.0)
    assert math.isnan(bins[0].size_low)  # one step is one cluster
    assert bins[-1].tokens == 0
    assert math.isnan(bins[-1].size)


# --- what Propositions 4.2 and 4.3 predict for the bins ---------------------------------------------------


def collision(probs: list[float], token: int) -> float:
    """Σ_{k≠a} p_k²."""
    return sum(p * p for k, p in enumerate(probs) if k != token)


def corrected_form(probs: list[float], token: int) -> float:
    """Proposition 4.3's mean of -Δ to second order, over σ², from the whole distribution of a state."""
    return 0.5 - 2 * probs[token] + 1.5 * sum(p * p for p in probs)


STATES = [[0.5, 0.2, 0.1, 0.1, 0.1], [0.05] * 20, [0.9, 0.02, 0.02, 0.02, 0.02, 0.02]]


def test_predictions_from_sampled_tokens_are_those_of_the_whole_states() -> None:
    """Each state has every token as often as its probability, with Δ² at its mean σ²[(1-p)² + Σ_{k≠a} p_k²]. The
    prediction from p, Δ² and σ alone then equals the form that needs all probabilities."""
    sigma, drawn = 0.03, []
    for probs in STATES:
        for a, p in enumerate(probs):
            size = sigma * math.sqrt((1 - p) ** 2 + collision(probs, a))
            drawn += [(p, size, a, probs), (p, -size, a, probs)] * round(100 * p)
    train, delta = np.log([p for p, *_ in drawn]), np.array([d for _, d, *_ in drawn])
    steps = np.arange(len(drawn), dtype=np.int32)
    bins = [b for b in delta_bins([run({}, 0, kept(steps, train, train - delta))]) if b.tokens]
    assert len(bins) == 5
    for b in bins:
        inside = [item for item in drawn if b.nats_from <= -math.log(item[0]) < b.nats_to]
        assert b.sigma == pytest.approx(sigma, rel=1e-12)
        paper = np.mean([(1 - p) ** 2 + collision(probs, a) for p, _, a, probs in inside])
        corrected = np.mean([corrected_form(probs, a) for _, _, a, probs in inside])
        assert b.signed_paper == pytest.approx(sigma**2 * paper, rel=1e-12)
        assert b.signed_corrected == pytest.approx(sigma**2 * corrected, rel=1e-9)
        normal = math.sqrt(2 / math.pi) * sigma * np.mean([1 - p for p, *_ in inside])
        assert (b.size_normal_low, b.size_normal_high) == pytest.approx((normal, math.sqrt(2) * normal), rel=1e-12)


def test_predictions_agree_with_simulated_noise_on_the_logits() -> None:
    """Tokens sampled from noisy states: in every bin the corrected mean of -Δ is within four standard errors of the
    measured mean, and the mean |Δ| within its two ends. The paper's form is excluded where it differs most."""
    rng, sigma, count, gaps = np.random.default_rng(5), 0.1, 60_000, []
    parts = []
    for probs in STATES:
        logits = np.log(probs)
        noisy = logits + rng.normal(0, sigma, (count, len(probs)))
        infer = noisy - np.log(np.exp(noisy).sum(1, keepdims=True))
        token = (np.exp(infer).cumsum(1) < rng.random((count, 1))).sum(1).clip(max=len(probs) - 1)
        parts.append((logits[token], infer[np.arange(count), token]))
    train, infer = np.concatenate(parts, axis=1)
    tokens = kept(np.arange(len(train), dtype=np.int32), train, infer)
    for b in delta_bins([run({}, 0, tokens)]):
        if not b.tokens:
            continue
        error = math.sqrt(b.signed_paper / b.tokens)
        assert b.sigma == pytest.approx(sigma, rel=0.02)
        assert abs(b.signed - b.signed_corrected) < 4 * error
        gaps.append((b.signed_paper - b.signed) / error)
        assert b.size_normal_low - 4 * error < b.size < b.size_normal_high + 4 * error
    assert max(gaps) > 8


def test_epsilon_is_that_of_the_worst_case() -> None:
    """ε_a = -e and +e elsewhere give |Δ_a| = ln(p + (1-p) e^{2e}) for every probability: every bin recovers e."""
    e = 0.2
    probs = np.array([0.999, 0.7, 0.3, 0.05, 1e-3, 1e-6])
    delta = np.log(probs + (1 - probs) * math.exp(2 * e))
    tokens = kept(np.arange(6, dtype=np.int32), np.log(probs), np.log(probs) - delta)
    bins = delta_bins([run({}, 0, tokens)])
    assert [b.epsilon for b in bins if b.tokens == 1] == pytest.approx([e] * 6, rel=1e-9)
    collapsed = kept(np.zeros(1, dtype=np.int32), np.array([-0.05]), np.array([-5000.0]))
    assert delta_bins([run({}, 0, collapsed)])[0].epsilon == pytest.approx(
        (4999.95 - math.log(1 - math.exp(-0.05))) / 2
    )


def test_predictions_without_tokens_or_for_certain_ones() -> None:
    sure = delta_bins([run({}, 0, kept(np.zeros(2, dtype=np.int32), np.zeros(2), np.zeros(2)))])
    assert all(math.isnan(x) for x in (sure[0].epsilon, sure[0].sigma, sure[0].signed_corrected))
    assert (sure[0].size, sure[0].signed_paper) == (0.0, 0.0)
    assert all(math.isnan(x) for x in (sure[1].epsilon, sure[1].signed_paper))


def test_time_shares() -> None:
    runs = [run({"train/step": [0, 1], "time/step": [2, 2], "time/rollout": [1, 1], "time/backward": [0.5, NAN]})]
    found = {share.phase: share for share in time_shares(runs)}
    assert found["rollout"].share == pytest.approx(0.5)
    assert found["rollout"].seconds == pytest.approx(1.0)
    assert found["backward"].share == pytest.approx(0.125)
    assert found["other"].share == pytest.approx(0.375)
    assert sum(share.share for share in found.values()) == pytest.approx(1)
    assert sum(share.seconds for share in found.values()) == pytest.approx(2)


def test_unrecorded_or_overlapping_time() -> None:
    assert all(math.isnan(share.share) for share in time_shares([run({"train/step": [0]})]))
    overlap = time_shares([run({"train/step": [0], "time/step": [1], "time/rollout": [1], "time/forward": [1]})])
    assert sum(share.share for share in overlap) == pytest.approx(1)


def test_mean_of_the_last_steps_and_of_absent_metrics() -> None:
    runs = [run({"train/step": list(range(20)), "a": list(range(20))}), run({"train/step": [0], "a": [NAN]}, 1)]
    np.testing.assert_array_equal(mean_of(runs, "a", last=0.1), [18.5, NAN])
    np.testing.assert_array_equal(mean_of(runs, "a"), [9.5, NAN])
    assert np.isnan(mean_of(runs, "absent")).all()


def test_two_fields_of_one_column() -> None:
    """Otherwise one field would overwrite the other."""
    inner = Interval(1.0, 0.0, 2.0, 3)
    with pytest.raises(ValueError, match="two fields of Twice give the column gain_low"):
        flat_rows([make_dataclass("Twice", ["gain", "gain_low"])(inner, 0.5)])


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.csv"
    single = paired_difference([0.5], [0.0])
    rows = flat_rows([PolicyScore("x", 3, Interval(1.0, math.nan, math.nan, 1), 0.25, single)])
    write_csv(path, rows)
    with path.open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["arm"], line["avg_mean"], line["avg_low"], line["gain_mean"]) == ("x", "1", "", "0.5")
    write_csv(path, [{"a": 1 / 3, "b": 7, "c": math.inf}])
    assert path.read_text() == "a,b,c\n0.333333333,7,inf\n"
    write_csv(path, [])
    assert path.read_text().strip() == ""
