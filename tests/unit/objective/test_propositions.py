"""Propositions 4.2 and 4.3, in the forms that hold: of one state, with the package's own log-probs in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrl.objective.safe_set import token_logprobs

FloatArray = NDArray[np.float64]


def log_probs(logits: FloatArray, token: int) -> FloatArray:
    """log π(token) of each row of logits [N, V], or of one row [V]."""
    rows = torch.tensor(np.atleast_2d(logits), dtype=torch.float64)
    return token_logprobs(rows, torch.full((len(rows),), token), "full").logp_T.numpy()


# --- Proposition 4.2: the worst case --------------------------------------------------------------------


@st.composite
def perturbed(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, float]:
    """Logits, a perturbation of them, and the bound that it keeps."""
    size = draw(st.integers(2, 12))
    bound = draw(st.floats(1e-3, 3.0))
    logits = draw(st.lists(st.floats(-15, 15), min_size=size, max_size=size))
    shares = draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))
    return np.array(logits), bound * np.array(shares), bound


@settings(max_examples=300, deadline=None)
@given(perturbed(), st.data())
def test_no_perturbation_beats_the_worst_case(drawn: tuple[FloatArray, FloatArray, float], data: st.DataObject) -> None:
    """|Δ_a| ≤ log(p_a + (1 − p_a) e^{2e}) for every token and every |ε_k| ≤ e."""
    logits, noise, bound = drawn
    token = data.draw(st.integers(0, len(logits) - 1))
    train = log_probs(logits, token)[0]
    delta = train - log_probs(logits + noise, token)[0]
    probability = math.exp(train)
    assert abs(delta) <= math.log(probability + (1 - probability) * math.exp(2 * bound)) + 1e-10


@settings(max_examples=100, deadline=None)
@given(perturbed(), st.data())
def test_the_worst_case_is_attained(drawn: tuple[FloatArray, FloatArray, float], data: st.DataObject) -> None:
    """By ε_a = −e and +e elsewhere; it is no less than the paper's 2e(1 − p_a), which is its first order."""
    logits, _, bound = drawn
    token = data.draw(st.integers(0, len(logits) - 1))
    noise = np.full_like(logits, bound)
    noise[token] = -bound
    train = log_probs(logits, token)[0]
    delta = train - log_probs(logits + noise, token)[0]
    probability = math.exp(train)
    assert delta == pytest.approx(math.log(probability + (1 - probability) * math.exp(2 * bound)), rel=1e-9, abs=1e-10)
    assert delta >= 2 * bound * (1 - probability) - 1e-10


def test_the_papers_form_holds_to_first_order_only() -> None:
    logits = np.zeros(100)
    for bound in (1e-4, 0.1, 1.0):
        noise = np.full(100, bound)
        noise[0] = -bound
        delta = (log_probs(logits, 0) - log_probs(logits + noise, 0))[0]
        first_order = 2 * bound * 0.99
        assert first_order < delta < first_order * (1 + bound)


# --- Proposition 4.3: what a sampled token looks like ----------------------------------------------------

SIGMA, PAIRS = 0.02, 40_000
Z = 3.29
"""Of a two-sided normal interval that holds with 99.9 %."""


def mean_of_sampled(probs: FloatArray, token: int) -> tuple[float, float]:
    """Monte Carlo mean of −Δ_a / σ² given that a was sampled from π_infer, and the half-width of its interval.

    Noise is drawn in pairs (ε, −ε), each draw weighted by p'_a, the chance that a is sampled under it. The half-width
    belongs to a ratio of means over independent pairs. At this σ terms beyond second order are 1e-3 of the value.
    """
    noise = np.random.default_rng(11).normal(0, SIGMA, (PAIRS, len(probs)))
    logits = np.log(probs)
    both = [log_probs(logits + sign * noise, token) for sign in (1, -1)]
    rise = [logp - math.log(probs[token]) for logp in both]
    weight = (np.exp(both[0]) + np.exp(both[1])) / 2
    value = (np.exp(both[0]) * rise[0] + np.exp(both[1]) * rise[1]) / 2
    mean = value.mean() / weight.mean()
    error = (value - mean * weight).std(ddof=1) / weight.mean() / math.sqrt(PAIRS)
    return mean / SIGMA**2, Z * error / SIGMA**2


def corrected_form(probs: FloatArray, token: int) -> float:
    return 0.5 - 2 * probs[token] + 1.5 * float(np.sum(probs**2))


def papers_form(probs: FloatArray, token: int) -> float:
    """(1 − p_a)(1 − p'_a) + Σ_{k≠a} p_k p'_k at p' = p."""
    others = np.delete(probs, token)
    return (1 - probs[token]) ** 2 + float(np.sum(others**2))


FLAT = np.full(50, 1 / 50)
HEAD = np.array([0.4, *[0.6 / 49] * 49])
PEAKED = np.array([0.98, *[0.02 / 49] * 49])
SKEWED = np.arange(1.0, 31.0) ** -1.5 / np.sum(np.arange(1.0, 31.0) ** -1.5)


@pytest.mark.parametrize(
    ("probs", "token"),
    [(FLAT, 0), (HEAD, 0), (HEAD, 1), (PEAKED, 0), (PEAKED, 7), (SKEWED, 0), (SKEWED, 3), (SKEWED, 29)],
)
def test_the_mean_of_a_sampled_token_is_the_corrected_form(probs: FloatArray, token: int) -> None:
    """σ² [½ − 2 p_a + (3/2) Σ p_k²]; the paper's form is more by ½σ² (1 − Σ p_k²), and excluded where that is seen."""
    found, half_width = mean_of_sampled(probs, token)
    expected = corrected_form(probs, token)
    assert half_width < 0.05
    assert abs(found - expected) < half_width + 1e-3
    gap = papers_form(probs, token) - expected
    assert gap == pytest.approx((1 - np.sum(probs**2)) / 2)
    if gap > 0.1:
        assert abs(found - papers_form(probs, token)) > half_width + 1e-3


def test_the_two_forms_at_known_states() -> None:
    """A flat state and a head over a flat rest; the signs differ."""
    assert corrected_form(FLAT, 0) == pytest.approx(0.49) and papers_form(FLAT, 0) == pytest.approx(0.98)
    assert corrected_form(HEAD, 0) == pytest.approx(-0.05, abs=2e-3)
    assert papers_form(HEAD, 0) == pytest.approx(0.37, abs=3e-3)
