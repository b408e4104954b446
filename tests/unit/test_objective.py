"""The objective: each piece against a loop, and the whole estimator against the theorems, by enumeration.

The enumeration is a softmax model of sequences of two tokens out of four, in float64: every expectation is a sum
over sixteen sequences, and every gradient of J is a central difference of that sum.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailrl.objective.advantages import rloo
from tailrl.objective.corrections import SequenceWeights, sequence_any, sequence_sum, sequence_weights
from tailrl.objective.losses import policy_gradient
from tailrl.settings import Correction
from tailrl.vocabulary import token_logprobs

FloatArray = NDArray[np.float64]
NONE = Correction()
MIS = Correction(weight="mis", threshold=2.0)
UNTRUNCATED = Correction(weight="mis", threshold=1e30)


# --- advantages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [2, 3, 8])
def test_rloo_leaves_one_out(group: int) -> None:
    rewards = np.random.default_rng(group).normal(size=(5, group))
    expected = [[row[i] - np.mean([row[j] for j in range(group) if j != i]) for i in range(group)] for row in rewards]
    found = rloo(torch.tensor(rewards))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-12)


def test_rloo_of_equal_rewards_is_exactly_zero() -> None:
    assert (rloo(torch.tensor([[0.0] * 8, [1.0] * 8])) == 0).all()


# --- corrections -------------------------------------------------------------------------------------


def weigh(
    deltas: list[list[float]], correction: Correction, outside: list[list[bool]] | None = None
) -> SequenceWeights:
    sequence = [n for n, row in enumerate(deltas) for _ in row]
    outside = outside or [[False] * len(row) for row in deltas]
    return sequence_weights(
        torch.tensor(list(itertools.chain(*deltas))),
        torch.tensor(list(itertools.chain(*outside)), dtype=torch.bool),
        torch.tensor(sequence, dtype=torch.int64),
        len(deltas),
        correction,
    )


def test_sums_are_over_sequences() -> None:
    values, sequence = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0])
    assert sequence_sum(values, sequence, 4).tolist() == [10.0, 0.0, 5.0, 0.0]
    assert sequence_any(values > 7, sequence, 4).tolist() == [True, False, False, False]


def test_no_correction_weighs_one_but_reports_the_ratio() -> None:
    found = weigh([[0.1, -0.3], [3.0]], NONE)
    assert found.weight_N.tolist() == [1.0, 1.0]
    assert found.raw_N.tolist() == pytest.approx([math.exp(-0.2), math.exp(3.0)])
    assert not found.rejected_N.any() and not found.vetoed_N.any()


def test_mis_weighs_by_the_ratio_and_rejects_above_the_threshold() -> None:
    found = weigh([[0.2, 0.3], [0.5, 0.3], [-4.0], [200.0]], MIS)
    assert found.weight_N.tolist() == pytest.approx([math.exp(0.5), 0.0, math.exp(-4.0), 0.0])
    assert found.rejected_N.tolist() == [False, True, False, True]


def test_a_weight_at_the_threshold_is_kept() -> None:
    at_one = Correction(weight="mis", threshold=1.0)
    found = weigh([[0.0, 0.0], [1e-6]], at_one)
    assert found.weight_N.tolist() == [1.0, 0.0]
    assert found.rejected_N.tolist() == [False, True]


@pytest.mark.parametrize("weight", ["none", "mis"])
def test_the_veto_looks_at_single_tokens(weight: str) -> None:
    veto = Correction(weight=weight, veto=1e-4)
    limit = torch.tensor(1e-4).log()
    below = torch.nextafter(limit, torch.tensor(-math.inf)).item()
    # The product of the third is as small, but no token's ratio is.
    found = weigh([[limit.item(), 9.0], [below, 9.0], [-5.0, -5.0, -5.0]], veto)
    assert found.vetoed_N.tolist() == [False, True, False]
    assert found.weight_N[1] == 0
    assert found.weight_N[2].item() == pytest.approx(1.0 if weight == "none" else math.exp(-15.0))


@pytest.mark.parametrize(
    ("correction", "weight"),
    [(NONE, 1.0), (MIS, 0.0), (Correction(veto=1e-4), 0.0), (Correction(weight="mis", veto=1e-4), 0.0)],
)
def test_a_token_outside_the_set_has_ratio_zero(correction: Correction, weight: float) -> None:
    found = weigh([[0.1, 500.0], [0.1]], correction, [[False, True], [False]])
    assert found.raw_N[0] == 0
    assert found.weight_N[0] == weight
    assert found.vetoed_N.tolist() == [correction.veto is not None, False]
    assert not found.rejected_N[0]
    assert found.weight_N[1] > 0


@pytest.mark.parametrize("correction", [NONE, MIS, Correction(weight="mis", veto=1e-4)])
def test_an_empty_sequence_weighs_one(correction: Correction) -> None:
    found = weigh([[], [0.5], []], correction)
    assert found.weight_N.tolist()[::2] == found.raw_N.tolist()[::2] == [1.0, 1.0]


def test_weights_carry_no_gradient() -> None:
    delta = torch.tensor([0.1, 0.2], requires_grad=True)
    found = sequence_weights(delta, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 1]), 2, MIS)
    assert not found.weight_N.requires_grad and not found.raw_N.requires_grad


# --- loss --------------------------------------------------------------------------------------------


def test_each_log_prob_is_pushed_by_its_sequences_weight_and_advantage() -> None:
    rng = np.random.default_rng(0)
    logp = torch.tensor(rng.normal(size=7), requires_grad=True)
    sequence = torch.tensor([0, 2, 2, 0, 3, 3, 3])
    advantage, weight = torch.tensor(rng.normal(size=4)), torch.tensor([1.5, 1.0, 0.0, 0.3], requires_grad=True)
    loss = policy_gradient(logp, sequence, advantage, weight.double(), step_sequences=10)
    loss.backward()
    terms = [-weight[n].item() * advantage[n].item() / 10 for n in sequence.tolist()]
    np.testing.assert_allclose(logp.grad, terms, atol=1e-12)
    assert loss.item() == pytest.approx(sum(t * v for t, v in zip(terms, logp.tolist(), strict=True)))
    assert weight.grad is None


def test_micro_batches_add_up_to_one_batch() -> None:
    rng = np.random.default_rng(1)
    lengths = [3, 1, 0, 5, 2, 4]
    sequence = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    logp, delta = torch.tensor(rng.normal(size=15), requires_grad=True), torch.tensor(rng.normal(0, 0.3, 15))
    outside = torch.arange(15) == 6
    advantage = torch.tensor(rng.normal(size=6))

    def gradient(groups: list[list[int]]) -> torch.Tensor:
        total = torch.zeros(15, dtype=torch.float64)
        for group in groups:
            place = torch.tensor([group.index(n) if n in group else -1 for n in sequence.tolist()])
            here = place >= 0
            weights = sequence_weights(delta[here], outside[here], place[here], len(group), MIS)
            loss = policy_gradient(logp[here], place[here], advantage[group], weights.weight_N, len(lengths))
            total += torch.autograd.grad(loss, logp)[0]
        return total

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    assert whole.abs().max() > 0
    for groups in ([[5, 4, 3, 2, 1, 0]], [[0], [1], [2], [3], [4], [5]], [[3, 0], [1, 2, 5], [4]]):
        torch.testing.assert_close(gradient(groups), whole, rtol=0, atol=1e-14)


# --- the estimator, by enumeration -------------------------------------------------------------------

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


def gradient_of_return(logits: FloatArray, safe: NDArray[np.bool_]) -> FloatArray:
    """Central differences of J = Σ_y π(y) R(y), the set held where it is."""
    gradient, width = np.zeros_like(logits), 1e-5
    for place in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[place] = width
        gradient[place] = (policy(logits + step, safe) - policy(logits - step, safe)) @ REWARD / (2 * width)
    return gradient


def engines(seed: int) -> tuple[FloatArray, FloatArray]:
    """Logits of a trainer and of a sampler that differ."""
    rng = np.random.default_rng(seed)
    train = rng.normal(0, 1.5, (5, 4))
    return train, train + rng.normal(0, 0.4, (5, 4))


def expected_loss_gradient(
    train: FloatArray, infer: FloatArray, log_rho: float | None, correction: Correction, members: int
) -> FloatArray:
    """−∇ of our loss, averaged over all groups of `members` sequences that the sampler can draw.

    One member: rewards as advantages. Two: RLOO over every pair.
    """
    safe_infer = np.ones_like(infer, dtype=bool) if log_rho is None else safe_by_definition(infer)
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
    found = token_logprobs(logits[rows], tokens, log_rho)
    weights = sequence_weights(found.logp_T - logp_infer, found.outside_T, sequence, len(flat), correction)
    loss = policy_gradient(found.logp_T, sequence, advantages.flatten(), weights.weight_N, members)
    return -torch.autograd.grad(loss, logits)[0].numpy()


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
    found = expected_loss_gradient(train, infer, LOG_RHO, UNTRUNCATED, members)
    expected = gradient_of_return(train, safe_by_definition(train))
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_without_nesting_there_is_a_bias() -> None:
    """What the theorem's condition is for: a token that the sampler cannot draw is never reinforced."""
    train, infer = next(
        pair for pair in map(engines, range(300)) if (safe_by_definition(pair[0]) > safe_by_definition(pair[1])).any()
    )
    found = expected_loss_gradient(train, infer, LOG_RHO, UNTRUNCATED, members=1)
    assert np.abs(found - gradient_of_return(train, safe_by_definition(train))).max() > 1e-3


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
    found = expected_loss_gradient(train, infer, None, NONE, members=1)
    assert np.abs(bias).max() > 1e-2
    np.testing.assert_allclose(found - gradient_of_return(train, every), bias, atol=1e-9)
    corrected = expected_loss_gradient(train, infer, None, UNTRUNCATED, members=1)
    np.testing.assert_allclose(corrected, gradient_of_return(train, every), atol=1e-9)
