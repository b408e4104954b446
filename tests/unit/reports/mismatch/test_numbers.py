"""Δ by probability, each bin against a plain loop; the mismatch of a run's first steps, and its ratio between arms."""

import itertools
import math

import numpy as np
import pytest
from claims_fixture import DVP, EXACT, NAIVE, STEPS, made, results_of
from claims_fixture import run_of_metrics as run
from numpy.typing import NDArray
from scipy import stats

from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.tokens import Tokens
from tailrl.reports.mismatch.numbers import FIRST_STEPS, NATS, FirstK3, delta_bins, first_k3, k3_ratios


def kept(step_T: NDArray[np.int32], trainer_T: FloatArray, sampler_T: FloatArray) -> Tokens:
    """Tokens of one response a step."""
    return Tokens(step_T, trainer_T, sampler_T, np.zeros(len(step_T), dtype=np.int32))


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


def test_the_first_ten_steps_count_and_no_other() -> None:
    early = [0.1] * 5 + [0.3] * 5
    results = results_of(
        a=made(NAIVE, unmasked=[early + [9.0] * (STEPS - FIRST_STEPS), [0.5] * STEPS]),
        gaps=made(DVP, unmasked=[[math.nan, 0.4] * (STEPS // 2)]),
        none=made(EXACT, unmasked=[[math.nan] * STEPS]),
    )
    found = {(one.arm, one.seed): one.k3 for one in first_k3(results)}
    none = found.pop(("none", 0))
    assert found == pytest.approx({("a", 0): 0.2, ("a", 1): 0.5, ("gaps", 0): 0.4})
    assert math.isnan(none)


def test_a_ratio_is_of_geometric_means_over_seeds_that_both_arms_have() -> None:
    above, below = {0: 2e-3, 1: 5e-3, 2: 3e-3, 7: 1.0}, {2: 4e-3, 1: 4e-3, 0: 4e-3, 9: 1e-9}
    numbers = [FirstK3("below", seed, k3) for seed, k3 in below.items()]
    numbers += [FirstK3("above", seed, k3) for seed, k3 in above.items()]
    numbers += [FirstK3("zero", seed, 0.0) for seed in below] + [FirstK3("unknown", 0, math.nan)]
    (found,) = k3_ratios(numbers)
    expected = stats.ttest_rel(np.log([2e-3, 5e-3, 3e-3]), np.log([4e-3] * 3))
    interval = np.exp(expected.confidence_interval(0.95))
    assert (found.first, found.second, found.n) == ("above", "below", 3)
    assert [found.ratio, found.low, found.high, found.p] == pytest.approx(
        [(2e-3 * 5e-3 * 3e-3) ** (1 / 3) / 4e-3, *interval, expected.pvalue]
    )


def test_a_single_seed_has_no_interval() -> None:
    (found,) = k3_ratios([FirstK3("a", 0, 1e-3), FirstK3("b", 0, 2e-3)])
    assert (found.ratio, found.n) == (pytest.approx(2.0), 1)
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)
