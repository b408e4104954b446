"""The tiny models against plain loops and finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch
from definitions import safe_tokens, softmax

from tailrl.objective.safe_set import safe_set
from tailrl.probes.gradients.enumeration import (
    MISMATCHES,
    MODULUS,
    constrained,
    divergence,
    dose_at,
    random_model,
    return_gradient,
    sampler_logits,
)

PROMPTS, VOCABULARY, LENGTH = 2, 4, 3
MODEL = random_model(VOCABULARY, LENGTH, PROMPTS, seed=5)
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
RULES = [("full", 0.0), ("min_p", -2.0), ("top_k", 2.0)]


def row_of(prompt: int, sequence: tuple[int, ...], place: int) -> int:
    """The state that a token is drawn from, by the table's layout."""
    return prompt if place == 0 else PROMPTS + (place - 1) * VOCABULARY + sequence[place - 1]


def chances(logits: np.ndarray, rule: str, threshold: float) -> np.ndarray:
    """Probability of every response to every prompt, a loop over its tokens."""
    rows = []
    for row in logits:
        probs = softmax(row.tolist())
        kept = [p if safe else 0.0 for p, safe in zip(probs, safe_tokens(probs, rule, threshold), strict=True)]
        rows.append([p / sum(kept) for p in kept])
    return np.array(
        [[math.prod(rows[row_of(k, y, t)][y[t]] for t in range(LENGTH)) for y in SEQUENCES] for k in range(PROMPTS)]
    )


def test_every_response_and_its_states() -> None:
    assert [tuple(y) for y in MODEL.tokens_NT.tolist()] == SEQUENCES
    expected = [[[row_of(k, y, t) for t in range(LENGTH)] for y in SEQUENCES] for k in range(PROMPTS)]
    assert MODEL.state_KNT.tolist() == expected
    assert all(len(set(rows)) == LENGTH for prompt in expected for rows in prompt)
    assert len(MODEL.logits_SV) == 1 + max(row for prompt in expected for rows in prompt for row in rows)


def test_a_model_of_single_tokens_has_the_prompts_states_alone() -> None:
    model = random_model(5, 1, 3, seed=0)
    assert model.state_KNT.shape == (3, 5, 1)
    assert model.state_KNT[:, :, 0].tolist() == [[k] * 5 for k in range(3)]


def test_the_reward_has_a_digit_for_each_token_and_none_for_the_tail() -> None:
    """Some digits of the head tokens, and a target per prompt, explain every reward."""
    head = VOCABULARY - VOCABULARY // 3

    def explained(digits: tuple[int, ...], prompt: int, target: int) -> bool:
        right = [max(y) < head and sum(digits[a] for a in y) % MODULUS == target for y in SEQUENCES]
        return bool((MODEL.reward_KN[prompt].numpy() == right).all())

    assert any(
        all(any(explained((*digits, 0), k, target) for target in range(MODULUS)) for k in range(PROMPTS))
        for digits in itertools.product(range(MODULUS), repeat=head)
    )
    assert 0 < MODEL.reward_KN.mean() < 1


def test_the_tail_lies_below_the_head() -> None:
    logits_SV = random_model(12, 3, 8, seed=1).logits_SV
    assert logits_SV[:, :8].mean().item() == pytest.approx(0, abs=0.25)
    np.testing.assert_allclose(logits_SV[:, 8:].mean(0), [-3, -7, -11, -15], atol=0.9)


@pytest.mark.parametrize(("rule", "threshold"), RULES)
def test_the_exact_gradient_is_that_of_finite_differences(rule: str, threshold: float) -> None:
    logits, width = MODEL.logits_SV.numpy(), 1e-5
    safe = [safe_tokens(softmax(row), rule, threshold) for row in logits.tolist()]
    assert rule == "full" or not all(map(all, safe))
    expected = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[place] = width
        returns = []
        for sign in (1, -1):
            moved = np.where(safe, logits + sign * step, -np.inf)
            returns.append((chances(moved, "full", 0.0) * MODEL.reward_KN.numpy()).sum(1).mean())
        expected[place] = (returns[0] - returns[1]) / (2 * width)
    found = return_gradient(MODEL, safe_set(MODEL.logits_SV, rule, threshold)).numpy()
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("rule", "threshold"), RULES)
def test_the_constrained_policy_is_the_definition(rule: str, threshold: float) -> None:
    found = MODEL.gather(constrained(MODEL.logits_SV, rule, threshold)).sum(-1).exp()
    np.testing.assert_allclose(found, chances(MODEL.logits_SV.numpy(), rule, threshold), atol=1e-14)


def test_the_floor_mixes_with_the_uniform_distribution() -> None:
    found = sampler_logits(MODEL.logits_SV, "floor", 0.2, 0).exp()
    probs = np.array([softmax(row) for row in MODEL.logits_SV.tolist()])
    np.testing.assert_allclose(found, 0.8 * probs + 0.2 / VOCABULARY, rtol=1e-12)


def test_rounding_is_to_a_grid_of_the_largest_logit() -> None:
    found = sampler_logits(MODEL.logits_SV, "rounding", 1 / 7, 0)
    for row, rounded in zip(MODEL.logits_SV.tolist(), found.tolist(), strict=True):
        step = max(map(abs, row)) / 7
        assert rounded == pytest.approx([round(z / step) * step for z in row], rel=1e-12)
        assert len({round(z / step) for z in rounded}) <= 15


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("nats", [1e-3, 3e-2])
def test_a_dose_has_the_divergence_that_is_asked_for(kind: str, nats: float) -> None:
    dose = dose_at(MODEL, kind, nats, 4, 2)
    found = divergence(MODEL, sampler_logits(MODEL.logits_SV, kind, dose, 4, 2))
    # Rounding jumps; so small a table has few logits.
    assert found == pytest.approx(nats, rel=0.3 if kind == "rounding" else 1e-3)


def test_noise_is_of_a_state_and_bias_of_a_token() -> None:
    large = torch.zeros(200, 50, dtype=torch.float64)
    moved = {kind: sampler_logits(large, kind, 0.3, 1) for kind in ("noise", "bias")}
    # 10,000 draws: the standard deviation is known to 0.7 %, five times which is tolerated; 50 draws: to 10 %.
    assert moved["noise"].std().item() == pytest.approx(0.3, rel=0.035)
    assert moved["bias"][0].std().item() == pytest.approx(0.3, rel=0.5)
    assert (moved["bias"] == moved["bias"][0]).all()
    assert moved["noise"].unique().numel() == large.numel()


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_direction_is_that_of_the_kind_and_the_seed(kind: str) -> None:
    once, again = (sampler_logits(MODEL.logits_SV, kind, 0.1, 4, 2) for _ in range(2))
    assert torch.equal(once, again)
    if kind not in ("floor", "rounding"):
        twice, other = (sampler_logits(MODEL.logits_SV, kind, *place) for place in ((0.2, 4, 2), (0.1, 4, 3)))
        np.testing.assert_allclose(twice - MODEL.logits_SV, 2 * (once - MODEL.logits_SV), atol=1e-14)
        assert not torch.equal(once, other)


def test_the_divergence_is_per_token_and_from_the_sampler() -> None:
    infer = sampler_logits(MODEL.logits_SV, "noise", 0.7, 0)
    ours, theirs = (chances(logits.numpy(), "full", 0.0) for logits in (MODEL.logits_SV, infer))
    expected = (theirs * np.log(theirs / ours)).sum(1).mean() / LENGTH
    assert expected > 0.01
    assert divergence(MODEL, infer) == pytest.approx(expected, rel=1e-12)
    assert divergence(MODEL, MODEL.logits_SV) == 0
