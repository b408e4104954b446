"""The constrained distribution against its definition by probabilities, written out in float64 numpy."""

import math

import numpy as np
import pytest
import torch
from definitions import safe_tokens
from numpy.typing import NDArray

from tailrl.objective.safe_set import PAPER_FILL, TokenLogprobs, safe_set, token_logprobs

FloatArray = NDArray[np.float64]
Rule = tuple[str, float]
"""A rule's name and its number: ln ρ, k or p."""
FULL: Rule = ("full", 0.0)
RULES: list[Rule] = [
    FULL,
    *(("min_p", log_rho) for log_rho in (0.0, -0.5, -3.0, -13.0, -60.0)),
    *(("entropy", log_rho) for log_rho in (0.0, -1.0, -8.0)),
    *(("top_k", k) for k in (1, 7, 40)),
    *(("top_p", p) for p in (0.1, 0.8, 0.999)),
]


def definition(logits: FloatArray, token: int, rule: Rule) -> dict[str, float]:
    """Everything that one row is asked for, from probabilities."""
    shifted = logits - logits.max()
    log_sum = math.log(sum(math.exp(z) for z in shifted))
    probs = [math.exp(z - log_sum) for z in shifted]
    safe = [a for a, is_safe in enumerate(safe_tokens(probs, *rule)) if is_safe]
    kept = sum(probs[a] for a in safe)
    return {
        "logp": shifted[token] - log_sum - math.log(kept) if token in safe else 0.0,
        "logp_full": shifted[token] - log_sum,
        "log_kept": math.log(kept),
        "kept_vocab": len(safe),
        "entropy": -sum(probs[a] / kept * math.log(probs[a] / kept) for a in safe if probs[a] > 0),
        "outside": token not in safe,
    }


def random_rows(scale: float, rows: int = 12, vocabulary: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(int(scale * 10))
    logits = torch.tensor(rng.normal(5.0, scale, (rows, vocabulary)))
    return logits, torch.tensor(rng.integers(0, vocabulary, rows))


def assert_is_definition(found: TokenLogprobs, logits: torch.Tensor, tokens: torch.Tensor, rule: Rule) -> None:
    for row, token in enumerate(tokens.tolist()):
        for name, value in definition(logits[row].double().numpy(), token, rule).items():
            got = getattr(found, f"{name}_T")[row].item()
            assert got == pytest.approx(value, rel=1e-9, abs=1e-9), (name, row)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_it_is_the_definition(scale: float, rule: Rule) -> None:
    logits, tokens = random_rows(scale)
    # The most probable token is always in the set; let half of the rows sample it.
    tokens[::2] = logits[::2].argmax(-1)
    found = token_logprobs(logits, tokens, *rule)
    assert_is_definition(found, logits, tokens, rule)
    expected = [definition(row.numpy(), 0, rule)["kept_vocab"] for row in logits]
    assert safe_set(logits, *rule).sum(-1).tolist() == expected
    assert safe_set(logits, *rule).gather(-1, logits.argmax(-1, keepdim=True)).all()


def test_the_full_vocabulary_is_log_softmax() -> None:
    logits, tokens = random_rows(4.0)
    found = token_logprobs(logits, tokens, "full")
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(found.logp_T, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.logp_full_T, expected, rtol=0, atol=1e-12)
    assert (found.log_kept_T == 0).all()
    assert not found.outside_T.any()


def test_one_safe_token_has_probability_one() -> None:
    found = token_logprobs(torch.tensor([[0.0, 20.0, -3.0]] * 2), torch.tensor([1, 0]), "min_p", -13.0)
    assert found.logp_T.tolist() == [0.0, 0.0]
    assert found.outside_T.tolist() == [False, True]
    assert found.entropy_T.abs().max() < 1e-5
    assert found.kept_vocab_T.tolist() == [1, 1]


def test_a_token_at_the_threshold_is_safe() -> None:
    logits = torch.tensor([3.0, 1.0, np.nextafter(np.float32(1.0), np.float32(0.0)), 3.0])
    assert safe_set(logits[None], "min_p", -2.0).tolist() == [[True, True, False, True]]
    # ρ = 1 keeps the largest alone, and all of them where several are.
    assert safe_set(logits[None], "min_p", 0.0).tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("rule", [FULL, ("min_p", -13.0), ("entropy", -13.0), ("top_k", 2), ("top_p", 0.9)], ids=str)
def test_extreme_logits_stay_finite(rule: Rule) -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, 0.0, -1e4], [-1e4, -1e4, -1e4, -1e4 - 3]], requires_grad=True)
    tokens = torch.tensor([1, 3])
    found = token_logprobs(logits, tokens, *rule)
    (gradient,) = torch.autograd.grad(found.logp_T.sum(), logits)
    assert gradient.isfinite().all()
    assert found.entropy_T.isfinite().all()
    for row, token in enumerate(tokens.tolist()):
        for name, value in definition(logits[row].detach().double().numpy(), token, rule).items():
            # float32 knows a number of this size to 1e-3, and nothing here may be worse than that.
            assert getattr(found, f"{name}_T")[row].item() == pytest.approx(value, abs=2e-3), (name, row)


@pytest.mark.parametrize("shift", [200.0, 1e4])
def test_the_entropy_of_shifted_logits_is_as_exact_as_their_log_probs(shift: float) -> None:
    logits, tokens = random_rows(3.0)
    moved = logits.float() + shift
    found = token_logprobs(moved, tokens, "full")
    expected = [definition(row.double().numpy(), 0, FULL)["entropy"] for row in moved]
    assert found.entropy_T.tolist() == pytest.approx(expected, abs=4e-7 * shift)


def test_a_token_of_probability_zero_costs_no_entropy() -> None:
    found = token_logprobs(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]), "full")
    assert found.entropy_T.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_shift_changes_nothing(rule: Rule) -> None:
    logits, tokens = random_rows(3.0)
    logits = (logits * 64).round() / 64  # then a shift by a power of two loses no bit
    for shift in (-256.0, 256.0):
        moved = token_logprobs(logits + shift, tokens, *rule)
        found = token_logprobs(logits, tokens, *rule)
        for name in TokenLogprobs.__slots__:
            torch.testing.assert_close(getattr(moved, name), getattr(found, name), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        ("min_p", [-1.0, -math.inf, -4.0, 0.0]),
        ("entropy", [-1.0, -math.inf, -4.0, 0.0]),
        ("top_k", [3, 1, 40, 1000]),
        ("top_p", [0.5, 1e-9, 0.99, 0.9]),
    ],
)
def test_every_row_may_have_its_own_threshold(rule: str, numbers: list[float]) -> None:
    logits, tokens = random_rows(3.0, rows=4)
    together = safe_set(logits, rule, torch.tensor(numbers)[:, None])
    found = token_logprobs(logits, tokens, rule, torch.tensor(numbers)[:, None])
    for row, value in enumerate(numbers):
        alone = safe_set(logits[row : row + 1], *(FULL if value == -math.inf else (rule, value)))
        assert torch.equal(together[row], alone[0])
        assert together[row].tolist() == safe_tokens(logits[row].softmax(-1).tolist(), rule, value)
        assert found.logp_T[row] == token_logprobs(logits[row : row + 1], tokens[row : row + 1], rule, value).logp_T


# --- the rules on states that are known ----------------------------------------------------------------


def test_top_k_keeps_ties_and_no_more_than_there_are() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert safe_set(logits, "top_k", 1).sum(-1).tolist() == [1, 1]
    assert safe_set(logits, "top_k", 2).tolist() == [[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert safe_set(logits, "top_k", 4).sum(-1).tolist() == [4, 4]
    assert safe_set(logits, "top_k", 6).all() and safe_set(logits, "top_k", 7).all()
    assert safe_set(torch.zeros(1, 6), "top_k", 1).all(), "where all tie, all are kept"


def test_top_p_keeps_the_fewest_that_hold_the_mass_and_their_ties() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for mass, kept in ((0.3, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 4), (1.0, 4)):
        assert safe_set(logits, "top_p", mass).sum().item() == kept, mass
    # A sum of powers of two is exact: the mass itself is enough.
    assert safe_set(torch.zeros(1, 4), "top_p", 0.5).all(), "where all tie, all are kept"
    uneven = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64).log()
    assert safe_set(uneven, "top_p", 0.5).tolist() == [[True, False, False]]


def test_the_entropy_rule_is_min_p_where_the_policy_is_flat() -> None:
    """Uniform over any number of choices, the rest impossible: exp(−H) is the largest probability."""
    logits = torch.full((3, 8), -1e3, dtype=torch.float64)
    for row, choices in enumerate((1, 3, 8)):
        logits[row, :choices] = 0.0
    for log_rho in (0.0, -2.0, -13.0):
        assert torch.equal(safe_set(logits, "entropy", log_rho), safe_set(logits, "min_p", log_rho))
    assert safe_set(logits, "entropy", 0.0).sum(-1).tolist() == [1, 3, 8]


def test_the_entropy_rule_keeps_more_of_a_tail_than_min_p() -> None:
    """max π ≥ exp(−H) always; by the text-book example 0.9 and a flat rest, by a factor that is known."""
    logits = torch.tensor([0.9] + [0.1 / 99] * 99, dtype=torch.float64).log()[None]
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1 / 99)
    ratio = math.log(0.1 / 99)  # of a rare token's probability
    for shift, kept in ((1e-6, 1), (-1e-6, 100)):
        assert safe_set(logits, "entropy", ratio + entropy + shift).sum().item() == kept
        assert safe_set(logits, "min_p", ratio - math.log(0.9) + shift).sum().item() == kept
    for scale in (0.3, 3.0, 12.0):
        rows, _ = random_rows(scale)
        assert (safe_set(rows, "min_p", -4.0) <= safe_set(rows, "entropy", -4.0)).all()


# --- gradients ---------------------------------------------------------------------------------------


def numeric_gradient(logits: FloatArray, token: int, safe: NDArray[np.bool_], fill: float | None) -> FloatArray:
    """Central differences of log softmax over a set that stays where it is; the rest is left out, or filled."""

    def log_prob(z: FloatArray) -> float:
        values = np.where(safe, z, -math.inf if fill is None else fill)
        return float(values[token] - values.max() - np.log(np.exp(values - values.max()).sum()))

    gradient, width = np.zeros_like(logits), 1e-5
    for a in range(len(logits)):
        step = np.zeros_like(logits)
        step[a] = width
        gradient[a] = (log_prob(logits + step) - log_prob(logits - step)) / (2 * width)
    return gradient


@pytest.mark.parametrize(
    "rule",
    [FULL, ("min_p", -0.5), ("min_p", -3.0), ("min_p", -13.0), ("entropy", -2.0), ("top_k", 5), ("top_p", 0.9)],
    ids=str,
)
def test_gradient_inside_the_set(rule: Rule) -> None:
    logits, tokens = random_rows(3.0)
    safe = safe_set(logits, *rule)
    tokens = torch.where(safe.gather(-1, tokens[:, None]).squeeze(-1), tokens, logits.argmax(-1))
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(token_logprobs(logits, tokens, *rule).logp_T.sum(), logits)
    for row, token in enumerate(tokens.tolist()):
        expected = numeric_gradient(logits[row].detach().numpy(), token, safe[row].numpy(), None)
        np.testing.assert_allclose(gradient[row], expected, atol=1e-8)
    assert (gradient[~safe] == 0).all()


def test_an_outside_token_sends_no_gradient_at_all() -> None:
    logits, _ = random_rows(6.0)
    tokens = logits.argmin(-1)
    tokens[0] = logits[0].argmax()
    logits.requires_grad_()
    found = token_logprobs(logits, tokens, "min_p", -3.0)
    (gradient,) = torch.autograd.grad((found.logp_T * torch.arange(1.0, 13.0)).sum(), logits)
    assert found.outside_T.tolist() == [False] + [True] * 11
    assert (found.logp_T[1:] == 0).all()
    assert (gradient[1:] == 0).all()
    assert gradient[0].abs().max() > 0


def test_only_the_constrained_log_prob_carries_a_gradient() -> None:
    logits, tokens = random_rows(1.0)
    found = token_logprobs(logits.requires_grad_(), tokens, "min_p", -3.0)
    assert [n for n in TokenLogprobs.__slots__ if getattr(found, n).requires_grad] == ["logp_T"]


@pytest.mark.parametrize("shift", [0.0, -30.0, -48.0])
def test_the_papers_fill_is_a_softmax_over_filled_logits(shift: float) -> None:
    """Inside and outside; at −48 the fill weighs as much as a safe token, and the two no longer agree."""
    logits, tokens = random_rows(3.0)
    logits += shift
    tokens[::2] = logits[::2].argmax(-1)
    safe = safe_set(logits, "min_p", -3.0)
    outside = ~safe.gather(-1, tokens[:, None]).squeeze(-1)
    assert outside.any() and not outside.all()
    filled = torch.where(safe, logits, PAPER_FILL)
    logits.requires_grad_()
    found = token_logprobs(logits, tokens, "min_p", -3.0, paper_fill=True)
    (gradient,) = torch.autograd.grad(found.logp_T.sum(), logits)
    expected = filled.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(found.logp_T, expected, rtol=0, atol=1e-12)
    assert torch.equal(found.outside_T, outside)
    for row, token in enumerate(tokens.tolist()):
        expected_row = numeric_gradient(logits[row].detach().numpy(), token, safe[row].numpy(), PAPER_FILL)
        np.testing.assert_allclose(gradient[row], expected_row, atol=1e-8)
    # What dropping avoids: an outside token pushes every safe logit down.
    assert (gradient[outside][safe[outside]] < 0).all()


def test_top_p_of_one_keeps_every_token() -> None:
    logits = 4 * torch.randn(50, 2048, generator=torch.Generator().manual_seed(0))
    assert safe_set(logits, "top_p", 1.0).all()


def test_split_inverts_joined() -> None:
    numbers_T = torch.arange(6.0)
    whole = TokenLogprobs(numbers_T, numbers_T + 10, -numbers_T, numbers_T.long(), numbers_T / 2, numbers_T > 3)
    parts = whole.split([2, 0, 4])
    assert [len(part.logp_T) for part in parts] == [2, 0, 4]
    for name in ("logp_T", "logp_full_T", "log_kept_T", "kept_vocab_T", "entropy_T", "outside_T"):
        assert torch.equal(getattr(TokenLogprobs.joined(parts), name), getattr(whole, name)), name
    assert whole.in_set().tolist() == [0, 1, 2, 3, -math.inf, -math.inf]
