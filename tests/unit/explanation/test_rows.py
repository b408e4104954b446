"""Transforms of reduced rows are those of whole ones, by transformers' own processors and by vLLM's definitions."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tailrl.explanation import logits
from tailrl.explanation.rows import BINS, LARGEST, Rows, reduced

VOCABULARY, PROMPT, RESPONSE = 3000, 12, 20


@pytest.fixture(scope="module")
def sequence() -> tuple[Tensor, Tensor]:
    """Logits that predict a response's tokens [T, V], and the ids of prompt and response, some several times."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = 4 * torch.randn(RESPONSE, VOCABULARY, generator=generator)
    ids_P = torch.randint(0, 40, (PROMPT + RESPONSE,), generator=generator)
    # A token that is sampled is a probable one.
    logits_TV.scatter_add_(1, ids_P[PROMPT:, None], torch.full((RESPONSE, 1), 9.0))
    return logits_TV, ids_P


def rows_of(sequence: tuple[Tensor, Tensor]) -> Rows:
    logits_TV, ids_P = sequence
    return reduced(logits_TV, ids_P, torch.arange(PROMPT, PROMPT + RESPONSE), PROMPT, {1, VOCABULARY - 1})


def whole(sequence: tuple[Tensor, Tensor], change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Log-probs of the sampled tokens where the change gets the ids so far and one row of all logits."""
    logits_TV, ids_P = sequence
    found = []
    for place in range(RESPONSE):
        ids_1L, target = ids_P[None, : PROMPT + place], ids_P[PROMPT + place]
        changed_V = change(ids_1L, logits_TV[place : place + 1].clone())[0].double()
        kept_V = changed_V.isfinite()
        kept_V[target] = True
        raw_V = torch.where(changed_V.isfinite(), changed_V, logits_TV[place].double())
        found.append(raw_V[target] - raw_V[kept_V].logsumexp(-1))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "value", "change", "atol"),
    [
        ("temperature", 0.7, TemperatureLogitsWarper(0.7), 1e-3),
        ("temperature", 2.0, TemperatureLogitsWarper(2.0), 1e-2),
        ("repetition_penalty", 1.3, RepetitionPenaltyLogitsProcessor(1.3), 1e-5),
        ("top_k", 20, TopKLogitsWarper(20), 1e-5),
        ("top_p", 0.9, TopPLogitsWarper(0.9), 1e-5),
        ("min_p", 0.02, MinPLogitsWarper(0.02), 1e-5),
    ],
)
def test_a_transform_is_that_of_the_library(
    sequence: tuple[Tensor, Tensor], name: str, value: float, change: Callable[[Tensor, Tensor], Tensor], atol: float
) -> None:
    got_T = getattr(logits, name)(rows_of(sequence), value).logprobs()
    assert (got_T - whole(sequence, change)).abs().max() < atol


@pytest.mark.parametrize("token", [3, VOCABULARY - 1])
def test_a_bias_is_that_of_the_library(sequence: tuple[Tensor, Tensor], token: int) -> None:
    biased = SequenceBiasLogitsProcessor({(token,): 6.5})
    logits_TV, ids_P = sequence
    rows = reduced(logits_TV, ids_P, torch.arange(PROMPT, PROMPT + RESPONSE), PROMPT, {token})
    got_T = logits.token_bias(token)(rows, 6.5).logprobs()
    assert (got_T - whole(sequence, biased)).abs().max() < 1e-5
    assert (got_T - rows.logprobs()).abs().max() > 1e-3


def test_a_forbidden_end_is_that_of_the_library(sequence: tuple[Tensor, Tensor]) -> None:
    """No end token among the first 9 of the response; later it is as probable as ever."""
    end = int(sequence[0][:9].mean(0).argmax())
    forbidding = MinNewTokensLengthLogitsProcessor(PROMPT, 9, end)
    logits_TV, ids_P = sequence
    places = torch.arange(PROMPT, PROMPT + RESPONSE)
    rows = replace(reduced(logits_TV, ids_P, places, PROMPT, {end}), ends=(end,))
    got_T = logits.end_forbidden(rows, 9).logprobs()
    assert (got_T - whole(sequence, forbidding)).abs().max() < 1e-5
    assert (got_T - rows.logprobs())[:9].abs().max() > 1e-3 and torch.equal(got_T[9:], rows.logprobs()[9:])


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty_of_response"])
def test_a_penalty_on_the_response_is_that_of_its_definition(sequence: tuple[Tensor, Tensor], name: str) -> None:
    def change(ids_1L: Tensor, logits_1V: Tensor) -> Tensor:
        count_V = torch.bincount(ids_1L[0, PROMPT:], minlength=VOCABULARY)
        if name == "presence_penalty":
            return logits_1V - 0.6 * (count_V > 0)
        if name == "frequency_penalty":
            return logits_1V - 0.6 * count_V
        penalised_1V = torch.where(logits_1V > 0, logits_1V / 0.6, logits_1V * 0.6)
        return torch.where(count_V > 0, penalised_1V, logits_1V)

    got_T = getattr(logits, name)(rows_of(sequence), 0.6).logprobs()
    assert (got_T - whole(sequence, change)).abs().max() < 1e-5


def test_rows_are_small_and_exact_as_they_are(sequence: tuple[Tensor, Tensor]) -> None:
    rows = rows_of(sequence)
    assert rows.value_TE.shape[1] < LARGEST + BINS + 64
    assert (rows.logprobs() - whole(sequence, lambda _, logits_1V: logits_1V)).abs().max() < 1e-5
    assert torch.allclose(rows.top_logprobs(), sequence[0].double().log_softmax(-1).amax(-1), atol=1e-5)


def test_a_padded_vocabulary_adds_logits_of_zero(sequence: tuple[Tensor, Tensor]) -> None:
    padded = torch.nn.functional.pad(sequence[0].double(), (0, 500))
    target_T1 = sequence[1][PROMPT:, None]
    right_T = padded.log_softmax(-1).gather(1, target_T1)[:, 0]
    assert (logits.padded_vocabulary(rows_of(sequence), 500).logprobs() - right_T).abs().max() < 1e-5


@pytest.mark.parametrize("of_rounded", [True, False], ids=["sum of rounded logits", "sum of exact logits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_log_softmax_in_16_bits_is_torchs_difference_in_16_bits(
    sequence: tuple[Tensor, Tensor], dtype: torch.dtype, of_rounded: bool
) -> None:
    logits_TV, ids_P = sequence
    logits_TV = logits_TV.clone()
    logits_TV[torch.arange(0, RESPONSE, 2), ids_P[PROMPT::2]] += 15  # half of the tokens get a log-prob near 0
    small_TV = logits_TV.to(dtype)
    sum_T = (small_TV if of_rounded else logits_TV).float().logsumexp(-1).to(dtype)
    expected_T = small_TV.gather(1, ids_P[PROMPT:, None])[:, 0] - sum_T
    value = str(dtype).removeprefix("torch.") + ("" if of_rounded else "_sum")
    found_T = logits.log_softmax_16(rows_of((logits_TV, ids_P)), value).logprobs()
    assert expected_T.eq(0).any() and expected_T.lt(-1).any()
    torch.testing.assert_close(found_T.float(), expected_T.float(), atol=1e-5, rtol=1e-5)
