"""What every public function makes of logits that are no numbers, that are masked, or that have 16 bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tailrl.config.arm import Clip, Correction
from tailrl.config.vocabulary import Vocabulary
from tailrl.kernels.exact_logprobs import Scoring, exact_logprobs
from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.kernels.whole_rows import whole_row_scores
from tailrl.objective.batch import batch_loss
from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs
from tailrl.runtime.errors import NumericalError

T, V, H = 4, 7, 5
RULES: dict[str, tuple[float | None, Vocabulary]] = {
    "full": (None, Vocabulary()),
    "min_p": (-2.0, Vocabulary(rule="min_p", rho="e-2")),
    "entropy": (-2.0, Vocabulary(rule="entropy", rho="e-2")),
    "top_k": (3, Vocabulary(rule="top_k", k=3)),
    "top_p": (0.7, Vocabulary(rule="top_p", p=0.7)),
}
TOKENS = torch.tensor([1, 2, 3, 4])


def some_logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(0)).to(dtype)


def with_value(value: float, place: int) -> Tensor:
    """The logits with one value at a token of the second row: the sampled one, 2, or another."""
    logits = some_logits()
    logits[1, place] = value
    return logits


def of_batch(logits: Tensor, vocabulary: Vocabulary, **given: Any) -> tuple[Tensor, dict[str, float]]:
    """`batch_loss` of one response."""
    mask_NL, sampler_NL = torch.ones(1, T), torch.full((1, T), -2.0)
    return batch_loss(logits[None], TOKENS[None], mask_NL, sampler_NL, torch.tensor([1.0]), vocabulary, **given)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_logit_that_is_no_number_is_refused(rule: str, value: float, place: int) -> None:
    """Under a pruned vocabulary it would be in no set, and its token's log-prob 0."""
    threshold, vocabulary = RULES[rule]
    logits = with_value(value, place)
    calls: list[Callable[[], Any]] = [
        lambda: token_logprobs(logits, TOKENS, rule, threshold),
        lambda: token_logprobs(logits, TOKENS, rule, threshold, paper_fill=True),
        lambda: token_logprobs(logits, TOKENS, "full", None, False, torch.ones(T, V, dtype=torch.bool)),
        lambda: safe_set(logits, rule, threshold),
        lambda: of_batch(logits, vocabulary),
        lambda: of_batch(logits, vocabulary, correction=Correction(token="mask", veto=1e-4)),
        lambda: of_batch(logits, vocabulary, clip=Clip(ratio="bypass")),
    ]
    for call in calls:
        with pytest.raises(NumericalError, match=r"^a logit is NaN or \+inf, or a row has no finite one$"):
            call()


def test_a_row_without_a_finite_logit_is_refused_and_padding_is_not_looked_at() -> None:
    logits = some_logits()
    logits[1] = -torch.inf
    for rule, (threshold, _) in RULES.items():
        with pytest.raises(NumericalError):
            token_logprobs(logits, TOKENS, rule, threshold)
    mask = torch.tensor([[True, False, True, True]])
    given = (TOKENS[None], mask, torch.full((1, T), -2.0), torch.tensor([1.0]), RULES["min_p"][1])
    assert batch_loss(logits[None], *given)[0].isfinite()


@pytest.mark.parametrize("rule", RULES)
def test_a_masked_token_is_as_one_that_is_not_there(rule: str) -> None:
    """−inf at tokens that nobody sampled: the log-probs, sets and gradients are those of the other tokens."""
    threshold, _ = RULES[rule]
    masked = some_logits()
    masked[:, 5:] = -torch.inf
    whole, part = masked.clone().requires_grad_(), some_logits()[:, :5].clone().requires_grad_()
    found, wanted = (token_logprobs(x, TOKENS, rule, threshold) for x in (whole, part))
    for name in ("logp_T", "logp_full_T", "log_kept_T", "entropy_T", "outside_T"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    (slope,) = torch.autograd.grad(found.logp_T.sum(), whole)
    torch.testing.assert_close(slope[:, :5], torch.autograd.grad(wanted.logp_T.sum(), part)[0])
    assert not slope[:, 5:].any()
    if rule != "full":
        assert torch.equal(safe_set(masked, rule, threshold)[:, :5], safe_set(part.detach(), rule, threshold))
        masked[1, 2] = -torch.inf
        impossible = token_logprobs(masked, TOKENS, rule, threshold)
        assert impossible.outside_T.tolist()[1] and impossible.logp_T[1] == 0


# --- from hidden states ----------------------------------------------------------------------------------


def hidden_and_head(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, H, generator=generator).to(dtype) for n in (T, V))  # type: ignore[return-value]


Score = Callable[[Tensor, Tensor], TokenLogprobs]


def chunked(hidden_TH: Tensor, weight_VH: Tensor) -> TokenLogprobs:
    return constrained_logprobs(hidden_TH, weight_VH, TOKENS, "min_p", -2.0)


def exact(hidden_TH: Tensor, weight_VH: Tensor) -> TokenLogprobs:
    return exact_logprobs(
        hidden_TH, weight_VH, TOKENS, torch.full((T, 1), -2.0), Scoring("min_p"), [0] * T, list(range(T))
    )


def replayed(hidden_TH: Tensor, weight_VH: Tensor) -> TokenLogprobs:
    vocabulary = Vocabulary(rule="min_p", rho="e-2", side="replay")
    threshold_T1 = torch.full((T, 1), -2.0)
    given = (hidden_TH, weight_VH, TOKENS, some_logits(), threshold_T1, 1.0, vocabulary, Correction())
    return whole_row_scores(*given)[0]


SCORES: list[Score] = [chunked, exact, replayed]


@pytest.mark.parametrize("score", SCORES)
def test_hidden_states_and_heads_that_are_no_numbers_are_refused(score: Score) -> None:
    for value in (torch.nan, torch.inf, 3e38):  # a product with the last overflows
        for which in range(2):
            given = hidden_and_head()
            given[which][1] = value
            with pytest.raises(NumericalError):
                score(*given)


def test_a_replayed_set_of_a_sampler_without_numbers_is_refused() -> None:
    vocabulary, threshold_T1 = Vocabulary(rule="min_p", rho="e-2", side="replay"), torch.full((T, 1), -2.0)
    for correction in (Correction(), Correction(centering="full")):
        given = (TOKENS, with_value(torch.nan, 0), threshold_T1, 1.0, vocabulary, correction)
        with pytest.raises(NumericalError):
            whole_row_scores(*hidden_and_head(), *given)


# --- 16 bits, 32 and 64 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_have_log_probs_of_32(rule: str, dtype: torch.dtype) -> None:
    """Those of the same numbers in 32 bits, sets too; the gradient is the logits' own."""
    threshold, vocabulary = RULES[rule]
    few = (8 * some_logits()).to(dtype).requires_grad_()
    found = token_logprobs(few, TOKENS, rule, threshold)
    wanted = token_logprobs(few.detach().float(), TOKENS, rule, threshold)
    for name in TokenLogprobs.__slots__:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.logp_T.dtype == torch.float32
    assert torch.equal(safe_set(few.detach(), rule, threshold), safe_set(few.detach().float(), rule, threshold))
    (slope,) = torch.autograd.grad(found.logp_T.sum(), few)
    assert slope.dtype == dtype
    assert of_batch(few, vocabulary)[0].item() == of_batch(few.detach().float(), vocabulary)[0].item()


def test_float64_stays_float64() -> None:
    logits = some_logits(torch.float64) + 1e-12
    loss, _ = of_batch(logits, Vocabulary())
    wanted = -logits.log_softmax(-1).gather(1, TOKENS[:, None]).sum()
    assert loss.dtype == torch.float64 and abs(loss - wanted) < 1e-14
    assert token_logprobs(logits, TOKENS, "min_p", -2.0).logp_T.dtype == torch.float64


@pytest.mark.parametrize("score", SCORES)
def test_hidden_states_of_16_bits_have_log_probs_of_32(score: Score) -> None:
    """The product adds up in 32 bits, and is not rounded to 16; the exact engine's is, on both sides alike."""
    for dtype in (torch.bfloat16, torch.float16):
        few = hidden_and_head(dtype)
        found, wanted = score(*few), score(few[0].float(), few[1].float())
        assert found.logp_T.dtype == torch.float32
        if score is not exact:
            torch.testing.assert_close(found.logp_T, wanted.logp_T, rtol=0, atol=1e-6)
    double = hidden_and_head(torch.float64)
    exact_T = (double[0] @ double[1].T).log_softmax(-1).gather(1, TOKENS[:, None]).squeeze(1)
    found = score(*double)
    assert found.logp_full_T.dtype == torch.float64
    torch.testing.assert_close(found.logp_full_T, exact_T, rtol=0, atol=1e-14)
