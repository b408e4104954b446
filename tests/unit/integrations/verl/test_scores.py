"""Scores of logits in chunks, beside the definition in float64; verl is not needed."""

import pytest
import torch
from torch import Tensor

from tailrl.integrations.verl import scores
from tailrl.integrations.verl.scores import FILL, score_logits
from tailrl.objective.safe_set import token_logprobs
from tailrl.runtime.errors import NumericalError


def sample(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_TV = (torch.randn(40, 60, generator=generator) * 2).to(dtype).requires_grad_()
    return logits_TV, torch.randint(60, (40,), generator=generator)


@pytest.mark.parametrize("rows_a_chunk", [1, 7, 1000])
def test_scores_and_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, rows_a_chunk: int) -> None:
    monkeypatch.setattr(scores, "LOGITS_A_CHUNK", rows_a_chunk * 60)
    logits_TV, tokens_T = sample()
    found = score_logits(logits_TV, tokens_T, -2.0)
    exact_TV = logits_TV.detach().double().requires_grad_()
    exact = token_logprobs(exact_TV, tokens_T, "min_p", -2.0)
    assert 5 < int(exact.outside_T.sum()) < 35
    expected_T = torch.where(exact.outside_T, FILL, exact.logp_T)
    torch.testing.assert_close(found.logp_T.double(), expected_T, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.log_kept_T.double(), exact.log_kept_T, atol=1e-6, rtol=0)
    assert torch.equal(found.set_size_T.long(), exact.kept_vocab_T)
    safe_TV = exact_TV >= exact_TV.amax(-1, keepdim=True) - 2.0
    top_T = exact_TV.masked_fill(~safe_TV, -torch.inf).log_softmax(-1).amax(-1)
    # Four numbers of up to 8 in float32 are added up: each is rounded by up to 5e-7.
    torch.testing.assert_close(found.log_top_T.double(), top_T, atol=2e-6, rtol=0)
    weight_T = torch.linspace(-1, 2, 40)
    (found.logp_T * weight_T).sum().backward()
    (expected_T * weight_T).sum().backward()
    assert logits_TV.grad is not None and exact_TV.grad is not None
    torch.testing.assert_close(logits_TV.grad.double(), exact_TV.grad, atol=1e-6, rtol=0)
    assert not logits_TV.grad[exact.outside_T].any(), "a token outside sends no gradient"


def test_logits_in_16_bits_are_scored_in_float32_under_autocast_too() -> None:
    logits_TV, tokens_T = sample(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score_logits(logits_TV, tokens_T, -2.0)
    exact = token_logprobs(logits_TV.detach().double(), tokens_T, "min_p", -2.0)
    assert found.logp_T.dtype == torch.float32
    inside_T = ~exact.outside_T
    torch.testing.assert_close(found.logp_T.double()[inside_T], exact.logp_T[inside_T], atol=1e-6, rtol=0)


def test_a_token_outside_costs_a_finite_number_that_no_token_inside_has() -> None:
    logits_TV = torch.tensor([[0.0, -29.0, -31.0]])
    scored = [score_logits(logits_TV, torch.tensor([token]), -30.0).logp_T.item() for token in range(3)]
    assert scored[1] > FILL and scored[2] == FILL == -50.0


def test_a_logit_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(NumericalError):
        score_logits(torch.tensor([[0.0, float("nan")]]), torch.tensor([0]), -2.0)
