"""The constrained distribution against its definition by probabilities, written out in float64 numpy."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailrl.vocabulary import PAPER_FILL, TokenLogprobs, safe_set, token_logprobs

FloatArray = NDArray[np.float64]
LOG_RHOS = [None, 0.0, -0.5, -3.0, -13.0, -60.0]


def definition(logits: FloatArray, token: int, log_rho: float | None) -> dict[str, float]:
    """Everything that one row is asked for, from probabilities: V_S = {a : p_a ≥ ρ max p}."""
    shifted = logits - logits.max()
    log_sum = math.log(sum(math.exp(z) for z in shifted))
    probs = [math.exp(z - log_sum) for z in shifted]
    rho = 0.0 if log_rho is None else math.exp(log_rho)
    safe = [a for a, p in enumerate(probs) if p >= rho * max(probs)]
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


def assert_is_definition(
    found: TokenLogprobs, logits: torch.Tensor, tokens: torch.Tensor, log_rho: float | None
) -> None:
    for row, token in enumerate(tokens.tolist()):
        for name, value in definition(logits[row].double().numpy(), token, log_rho).items():
            got = getattr(found, f"{name}_T")[row].item()
            assert got == pytest.approx(value, rel=1e-9, abs=1e-9), (name, row)


@pytest.mark.parametrize("log_rho", LOG_RHOS)
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_it_is_the_definition(scale: float, log_rho: float | None) -> None:
    logits, tokens = random_rows(scale)
    # The most probable token is always in the set; let half of the rows sample it.
    tokens[::2] = logits[::2].argmax(-1)
    found = token_logprobs(logits, tokens, log_rho)
    assert_is_definition(found, logits, tokens, log_rho)
    expected = [definition(row.numpy(), 0, log_rho)["kept_vocab"] for row in logits]
    assert safe_set(logits, log_rho).sum(-1).tolist() == expected


def test_the_full_vocabulary_is_log_softmax() -> None:
    logits, tokens = random_rows(4.0)
    found = token_logprobs(logits, tokens, None)
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(found.logp_T, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.logp_full_T, expected, rtol=0, atol=1e-12)
    assert (found.log_kept_T == 0).all()
    assert not found.outside_T.any()


def test_one_safe_token_has_probability_one() -> None:
    found = token_logprobs(torch.tensor([[0.0, 20.0, -3.0]] * 2), torch.tensor([1, 0]), -13.0)
    assert found.logp_T.tolist() == [0.0, 0.0]
    assert found.outside_T.tolist() == [False, True]
    assert found.entropy_T.abs().max() < 1e-5
    assert found.kept_vocab_T.tolist() == [1, 1]


def test_a_token_at_the_threshold_is_safe() -> None:
    logits = torch.tensor([3.0, 1.0, np.nextafter(np.float32(1.0), np.float32(0.0)), 3.0])
    assert safe_set(logits[None], -2.0).tolist() == [[True, True, False, True]]
    # ρ = 1 keeps the largest alone, and all of them where several are.
    assert safe_set(logits[None], 0.0).tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("log_rho", [None, -13.0])
def test_extreme_logits_stay_finite(log_rho: float | None) -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, 0.0, -1e4], [-1e4, -1e4, -1e4, -1e4 - 3]], requires_grad=True)
    tokens = torch.tensor([1, 3])
    found = token_logprobs(logits, tokens, log_rho)
    (gradient,) = torch.autograd.grad(found.logp_T.sum(), logits)
    assert gradient.isfinite().all()
    assert found.entropy_T.isfinite().all()
    for row, token in enumerate(tokens.tolist()):
        for name, value in definition(logits[row].detach().double().numpy(), token, log_rho).items():
            # float32 knows a number of this size to 1e-3, and nothing here may be worse than that.
            assert getattr(found, f"{name}_T")[row].item() == pytest.approx(value, abs=2e-3), (name, row)


@pytest.mark.parametrize("shift", [200.0, 1e4])
def test_the_entropy_of_shifted_logits_is_as_exact_as_their_log_probs(shift: float) -> None:
    logits, tokens = random_rows(3.0)
    moved = logits.float() + shift
    found = token_logprobs(moved, tokens, None)
    expected = [definition(row.double().numpy(), 0, None)["entropy"] for row in moved]
    assert found.entropy_T.tolist() == pytest.approx(expected, abs=4e-7 * shift)


def test_a_token_of_probability_zero_costs_no_entropy() -> None:
    found = token_logprobs(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]), None)
    assert found.entropy_T.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("log_rho", LOG_RHOS)
def test_a_shift_changes_nothing(log_rho: float | None) -> None:
    logits, tokens = random_rows(3.0)
    logits = (logits * 64).round() / 64  # then a shift by a power of two loses no bit
    for shift in (-256.0, 256.0):
        moved = token_logprobs(logits + shift, tokens, log_rho)
        found = token_logprobs(logits, tokens, log_rho)
        for name in TokenLogprobs.__slots__:
            torch.testing.assert_close(getattr(moved, name), getattr(found, name), rtol=0, atol=1e-10)


def test_every_row_may_have_its_own_threshold() -> None:
    logits, _ = random_rows(3.0, rows=4)
    log_rho = [-1.0, -math.inf, -4.0, 0.0]
    together = safe_set(logits, torch.tensor(log_rho)[:, None])
    for row, value in enumerate(log_rho):
        alone = safe_set(logits[row : row + 1], None if value == -math.inf else value)
        assert torch.equal(together[row], alone[0])


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


@pytest.mark.parametrize("log_rho", [None, -0.5, -3.0, -13.0])
def test_gradient_inside_the_set(log_rho: float | None) -> None:
    logits, tokens = random_rows(3.0)
    safe = safe_set(logits, log_rho)
    tokens = torch.where(safe.gather(-1, tokens[:, None]).squeeze(-1), tokens, logits.argmax(-1))
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(token_logprobs(logits, tokens, log_rho).logp_T.sum(), logits)
    for row, token in enumerate(tokens.tolist()):
        expected = numeric_gradient(logits[row].detach().numpy(), token, safe[row].numpy(), None)
        np.testing.assert_allclose(gradient[row], expected, atol=1e-8)
    assert (gradient[~safe] == 0).all()


def test_an_outside_token_sends_no_gradient_at_all() -> None:
    logits, _ = random_rows(6.0)
    tokens = logits.argmin(-1)
    tokens[0] = logits[0].argmax()
    logits.requires_grad_()
    found = token_logprobs(logits, tokens, -3.0)
    (gradient,) = torch.autograd.grad((found.logp_T * torch.arange(1.0, 13.0)).sum(), logits)
    assert found.outside_T.tolist() == [False] + [True] * 11
    assert (found.logp_T[1:] == 0).all()
    assert (gradient[1:] == 0).all()
    assert gradient[0].abs().max() > 0


def test_only_the_constrained_log_prob_carries_a_gradient() -> None:
    logits, tokens = random_rows(1.0)
    found = token_logprobs(logits.requires_grad_(), tokens, -3.0)
    assert [n for n in TokenLogprobs.__slots__ if getattr(found, n).requires_grad] == ["logp_T"]


@pytest.mark.parametrize("shift", [0.0, -30.0, -48.0])
def test_the_papers_fill_is_a_softmax_over_filled_logits(shift: float) -> None:
    """Inside and outside; at −48 the fill weighs as much as a safe token, and the two no longer agree."""
    logits, tokens = random_rows(3.0)
    logits += shift
    tokens[::2] = logits[::2].argmax(-1)
    safe = safe_set(logits, -3.0)
    outside = ~safe.gather(-1, tokens[:, None]).squeeze(-1)
    assert outside.any() and not outside.all()
    filled = torch.where(safe, logits, PAPER_FILL)
    logits.requires_grad_()
    found = token_logprobs(logits, tokens, -3.0, paper_fill=True)
    (gradient,) = torch.autograd.grad(found.logp_T.sum(), logits)
    expected = filled.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(found.logp_T, expected, rtol=0, atol=1e-12)
    assert torch.equal(found.outside_T, outside)
    for row, token in enumerate(tokens.tolist()):
        expected_row = numeric_gradient(logits[row].detach().numpy(), token, safe[row].numpy(), PAPER_FILL)
        np.testing.assert_allclose(gradient[row], expected_row, atol=1e-8)
    # What dropping avoids: an outside token pushes every safe logit down.
    assert (gradient[outside][safe[outside]] < 0).all()
