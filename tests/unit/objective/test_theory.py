"""The whole estimator against the theorems, by enumeration.

A softmax model of sequences of two tokens out of four, in float64: every expectation is a sum over sixteen
sequences, and every gradient of J is a central difference of that sum.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrl.config.arm import Correction
from tailrl.objective.advantages import rloo
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import token_logprobs

FloatArray = NDArray[np.float64]
NONE = Correction()
UNTRUNCATED = Correction(sequence="is")

SEQUENCES = list(itertools.product(range(4), repeat=2))
REWARD = np.random.default_rng(7).uniform(-1, 1, 16)
LOG_RHO = -2.0


def states(sequence: tuple[int, ...]) -> list[int]:
    """The rows of the model's table that a sequence reads: 0 at its start, then 1 + its first token."""
    return [0, 1 + sequence[0]]


def policy(logits: FloatArray, safe: NDArray[np.bool_]) -> FloatArray:
    """Probability of each of the sixteen sequences under a softmax over the safe tokens of each state."""
    weights = np.where(safe, np.exp(logits), 0.0)
    table = weights / weights.sum(-1, keepdims=True)
    return np.array([np.prod([table[s, a] for s, a in zip(states(y), y, strict=True)]) for y in SEQUENCES])


def safe_by_definition(logits: FloatArray) -> NDArray[np.bool_]:
    probs = np.exp(logits)
    return probs >= math.exp(LOG_RHO) * probs.max(-1, keepdims=True)


def gradient_of_return(logits: FloatArray, safe: NDArray[np.bool_], reward: FloatArray = REWARD) -> FloatArray:
    """Central differences of J = Σ_y π(y) R(y), the set held where it is."""
    gradient, width = np.zeros_like(logits), 1e-5
    for place in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[place] = width
        gradient[place] = (policy(logits + step, safe) - policy(logits - step, safe)) @ reward / (2 * width)
    return gradient


def engines(seed: int) -> tuple[FloatArray, FloatArray]:
    """Logits of a trainer and of a sampler that differ."""
    rng = np.random.default_rng(seed)
    train = rng.normal(0, 1.5, (5, 4))
    return train, train + rng.normal(0, 0.4, (5, 4))


def expected_loss_gradient(
    train: FloatArray, infer: FloatArray, rule: str, correction: Correction, members: int
) -> FloatArray:
    """−∇ of our loss, averaged over all groups of `members` sequences that the sampler can draw.

    One member: rewards as advantages. Two: RLOO over every pair.
    """
    safe_infer = np.ones_like(infer, dtype=bool) if rule == "full" else safe_by_definition(infer)
    probs = policy(infer, safe_infer)
    drawn = [g for g in itertools.product(range(16), repeat=members) if all(probs[y] > 0 for y in g)]
    rewards = torch.tensor([[REWARD[y] for y in group] for group in drawn])
    chance = torch.tensor([[np.prod(probs[list(group)])] for group in drawn])
    advantages = (rloo(rewards) if members > 1 else rewards) * chance
    flat = [y for group in drawn for y in group]
    rows = torch.tensor([s for y in flat for s in states(SEQUENCES[y])])
    tokens = torch.tensor([a for y in flat for a in SEQUENCES[y]])
    sequence = torch.arange(len(flat)).repeat_interleave(2)
    safe_logits = torch.tensor(np.where(safe_infer, infer, -np.inf))
    logp_infer = safe_logits.log_softmax(-1)[rows, tokens]
    logits = torch.tensor(train, requires_grad=True)
    found = token_logprobs(logits[rows], tokens, rule, LOG_RHO)
    advantage = advantages.flatten()[sequence]
    part = surrogate(found, logp_infer, advantage, sequence, len(flat), members, correction, clip=None)
    return -torch.autograd.grad(part.loss, logits)[0].numpy()


def nested_engines() -> list[tuple[FloatArray, FloatArray]]:
    """Pairs where the trainer's set lies within the sampler's, prunes something, and is not the same set."""
    found = []
    for seed in range(300):
        train, infer = engines(seed)
        safe, safe_infer = safe_by_definition(train), safe_by_definition(infer)
        if (safe <= safe_infer).all() and (safe != safe_infer).any():
            found.append((train, infer))
    return found[:4]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("train", "infer"), nested_engines())
def test_dvp_with_whole_weights_is_unbiased(train: FloatArray, infer: FloatArray, members: int) -> None:
    """Theorem 5.3: E_{π_infer^mp}[w ∇log π_train^mp R] = ∇J_mp where V_S ⊆ V'_S; RLOO's baseline adds no bias."""
    found = expected_loss_gradient(train, infer, "min_p", UNTRUNCATED, members)
    expected = gradient_of_return(train, safe_by_definition(train))
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-9)


def overlapping_engines() -> list[tuple[FloatArray, FloatArray]]:
    """Pairs where the constrained trainer has a sequence that the constrained sampler has not."""
    pairs = (engines(seed) for seed in range(300))
    mass = ([policy(logits, safe_by_definition(logits)) for logits in pair] for pair in pairs)
    lost = [seed for seed, (train, infer) in enumerate(mass) if ((train > 0) & (infer == 0)).any()]
    return [engines(seed) for seed in lost[:4]]


@pytest.mark.parametrize(("train", "infer"), overlapping_engines())
def test_without_nested_sets_the_bias_is_from_sequences_never_sampled(train: FloatArray, infer: FloatArray) -> None:
    """∇J_mp loses the sequences that the sampler never draws: ∇ Σ π_mp(y) R(y) over these sequences alone."""
    safe = safe_by_definition(train)
    drawn = policy(infer, safe_by_definition(infer)) > 0
    missing = gradient_of_return(train, safe, np.where(drawn, 0.0, REWARD))
    assert np.abs(missing).max() > 1e-3
    found = expected_loss_gradient(train, infer, "min_p", UNTRUNCATED, members=1)
    np.testing.assert_allclose(found, gradient_of_return(train, safe) - missing, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_naive_is_biased_by_theorem_4_1(seed: int) -> None:
    """b = E_{π_train}[(e^{−Δ_y} − 1) ∇log π_train R], with the softmax's gradient written out."""
    train, infer = engines(seed)
    every = np.ones_like(train, dtype=bool)
    probs_train, probs_infer = policy(train, every), policy(infer, every)
    table = np.exp(train) / np.exp(train).sum(-1, keepdims=True)
    bias = np.zeros_like(train)
    for y, sequence in enumerate(SEQUENCES):
        score = np.zeros_like(train)
        for s, a in zip(states(sequence), sequence, strict=True):
            score[s] += np.eye(4)[a] - table[s]
        delta = math.log(probs_train[y]) - math.log(probs_infer[y])
        bias += probs_train[y] * (math.exp(-delta) - 1) * score * REWARD[y]
    found = expected_loss_gradient(train, infer, "full", NONE, members=1)
    assert np.abs(bias).max() > 1e-2
    np.testing.assert_allclose(found - gradient_of_return(train, every), bias, atol=1e-9)
    corrected = expected_loss_gradient(train, infer, "full", UNTRUNCATED, members=1)
    np.testing.assert_allclose(corrected, gradient_of_return(train, every), atol=1e-9)


# --- Proposition 5.5: what pruning costs ----------------------------------------------------------------


def lost_mass(logits: FloatArray, rule: str, threshold: float) -> tuple[FloatArray, NDArray[np.bool_], float]:
    """Of each sequence, Σ_t (1 − Z_t) as the package measures it; the safe set; and the smallest Z there is."""
    rows = torch.tensor([s for y in SEQUENCES for s in states(y)])
    tokens = torch.tensor([a for y in SEQUENCES for a in y])
    found = token_logprobs(torch.tensor(logits)[rows], tokens, rule, threshold)
    kept = token_logprobs(torch.tensor(logits), torch.zeros(5, dtype=torch.int64), rule, threshold).log_kept_T.exp()
    safe = token_logprobs(torch.tensor(logits).repeat_interleave(4, 0), torch.arange(4).repeat(5), rule, threshold)
    lost = -found.log_kept_T.expm1().reshape(-1, 2).sum(1)
    return lost.numpy(), ~safe.outside_T.reshape(5, 4).numpy(), kept.min().item()


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=20, max_size=20),
    reward=st.lists(st.floats(-3, 3), min_size=16, max_size=16),
    rule=st.sampled_from([("min_p", -2.0), ("min_p", -0.1), ("entropy", -1.0), ("top_k", 2), ("top_p", 0.7)]),
)
def test_the_bias_of_pruning_is_bounded_by_the_lost_mass(
    logits: list[float], reward: list[float], rule: tuple[str, float]
) -> None:
    """|J_mp − J| ≤ range(R) E_{π^mp}[Σ_t (1 − Z_t)] ≤ range(R) T (1 − Z_min), for every set of the kind."""
    table, values = np.array(logits).reshape(5, 4), np.array(reward)
    lost, safe, least = lost_mass(table, *rule)
    masked, whole = policy(table, safe), policy(table, np.ones_like(safe))
    spread = values.max() - values.min()
    bound = spread * (masked @ lost)
    assert abs(masked @ values - whole @ values) <= bound + 1e-12
    assert bound <= spread * 2 * (1 - least) + 1e-12


@pytest.mark.parametrize("rule", [("min_p", -2.0), ("entropy", -1.0), ("top_k", 2), ("top_p", 0.7)])
def test_the_total_variation_is_the_chance_to_leave_the_set(rule: tuple[str, float]) -> None:
    """½ Σ_y |π^mp − π| = E_{π^mp}[1 − Π_t Z_t], what the metric is the mean of; the lost mass is no less."""
    table = np.random.default_rng(3).normal(0, 2, (5, 4))
    lost, safe, _ = lost_mass(table, *rule)
    masked, whole = policy(table, safe), policy(table, np.ones_like(safe))
    every = torch.arange(4).repeat(5)
    kept_S = token_logprobs(torch.tensor(table).repeat_interleave(4, 0), every, *rule).log_kept_T[::4].exp().numpy()
    left = np.array([1 - np.prod(kept_S[states(y)]) for y in SEQUENCES])
    assert np.abs(masked - whole).sum() / 2 == pytest.approx(masked @ left, rel=1e-12)
    assert 0.01 < masked @ left < masked @ lost


def test_the_bound_of_the_bias_is_attained() -> None:
    """Only the first token is pruned, and the reward is for a safe one: J_mp − J is the lost mass itself."""
    table = np.zeros((5, 4))
    table[0] = [0.0, -1.0, -3.0, -4.0]
    lost, safe, _ = lost_mass(table, "min_p", LOG_RHO)
    assert safe.sum() == 18
    reward = np.array([3.0 if y[0] in (0, 1) else 1.0 for y in SEQUENCES])
    masked, whole = policy(table, safe), policy(table, np.ones_like(safe))
    assert (masked - whole) @ reward == pytest.approx(2.0 * (masked @ lost), rel=1e-12)
    assert masked @ lost > 0.04
