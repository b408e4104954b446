"""The chunked rows against the plain definitions, with their gradients; and the memory that they spare."""

from typing import Any

import pytest
import torch

from tailrl.config.arm import Correction
from tailrl.config.vocabulary import Vocabulary
from tailrl.kernels import whole_rows
from tailrl.kernels.whole_rows import rows_at_once, whole_row_scores
from tailrl.objective.centering import expected_score
from tailrl.objective.safe_set import safe_set, token_logprobs

T, H, V = 23, 7, 40
TEMPERATURE = 0.8


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, H, generator=generator) for n in (T, V))
    logits = hidden @ weight.T / TEMPERATURE
    return {
        "hidden_TH": hidden.requires_grad_(),
        "weight_VH": weight.requires_grad_(),
        "tokens_T": logits.argmax(-1).detach(),
        "logits_sampler_TV": (logits + 0.3 * torch.randn(T, V, generator=generator)).detach(),
    }


CASES: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({}, {"centering": "full"}, 0.0),
    ({}, {"centering": "top_k", "centering_k": 3, "token": "tis"}, 0.0),
    ({"rule": "top_p", "p": 0.8, "side": "replay"}, {}, 0.8),
    ({"rule": "min_p", "rho": "e-2", "side": "replay"}, {"centering": "full"}, -2.0),
    ({"rule": "min_p", "rho": "e-2"}, {"centering": "full"}, -2.0),
    ({"rule": "min_p", "rho": "e-2", "side": "sampler"}, {"centering": "full"}, -2.0),
]


@pytest.mark.parametrize(("vocabulary", "correction", "threshold"), CASES)
def test_chunks_are_the_definition(
    vocabulary: dict[str, Any], correction: dict[str, Any], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_rows, "LOGITS_AT_ONCE", 5 * V)
    given, sets, own = tensors(), Vocabulary(**vocabulary), Correction(**correction)
    threshold_T1 = torch.full((T, 1), threshold)
    found, expected = whole_row_scores(
        **given, threshold_T1=threshold_T1, temperature=TEMPERATURE, vocabulary=sets, correction=own
    )
    plain = tensors()
    logits = plain["hidden_TH"] @ plain["weight_VH"].T / TEMPERATURE
    drawn = safe_set(given["logits_sampler_TV"], sets.sampler_rule, threshold_T1)
    safe = drawn if sets.side == "replay" else safe_set(logits, sets.trainer_rule, threshold_T1)
    wanted = token_logprobs(logits, plain["tokens_T"], "full", None, False, safe)
    for name in wanted.__slots__:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    total, sure = found.logp_T.sum(), wanted.logp_T.sum()
    assert (expected is None) == (own.centering == "none")
    if expected is not None:
        logp, logq = (
            x.masked_fill(~kept, -torch.inf).log_softmax(-1)
            for x, kept in ((logits, safe), (given["logits_sampler_TV"], drawn))
        )
        exact = expected_score(logp, logq, own)
        torch.testing.assert_close(expected, exact)
        total, sure = total - 2 * expected.sum(), sure - 2 * exact.sum()
    for name in ("hidden_TH", "weight_VH"):
        (one,) = torch.autograd.grad(total, given[name], retain_graph=True)
        (other,) = torch.autograd.grad(sure, plain[name], retain_graph=True)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert other.abs().max() > 1e-3


def test_a_replayed_set_holds_every_token_that_was_drawn_from_it() -> None:
    """Its own set would lack some, and its kept mass is the trainer's mass of the sampler's set."""
    given, sets = tensors(), Vocabulary(rule="top_k", k=4, side="replay")
    drawn = safe_set(given["logits_sampler_TV"], "top_k", 4)
    given["tokens_T"] = torch.where(drawn, given["logits_sampler_TV"], torch.inf).argmin(-1)
    threshold_T1 = torch.full((T, 1), 4.0)
    rows = {"threshold_T1": threshold_T1, "temperature": TEMPERATURE, "correction": Correction()}
    replayed, _ = whole_row_scores(**given, **rows, vocabulary=sets)
    own, _ = whole_row_scores(**given, **rows, vocabulary=Vocabulary(rule="top_k", k=4))
    assert own.outside_T.any() and not replayed.outside_T.any()
    probs = (given["hidden_TH"] @ given["weight_VH"].T / TEMPERATURE).softmax(-1).detach()
    torch.testing.assert_close(replayed.log_kept_T.exp(), (probs * drawn).sum(-1))
    assert (replayed.kept_vocab_T == 4).all()


def test_a_chunk_has_at_least_one_row() -> None:
    assert rows_at_once(10**9, gpu=True) == 1 and rows_at_once(2048, gpu=False) == 1024
