"""The loss of a padded batch is the packed one; what cannot be a batch is one sentence."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tailrl import (
    ESTIMATORS,
    batch_loss,
    constrained_logprobs,
    correct,
    disturb,
    log_ratio_metrics,
    safe_set,
    surrogate,
    token_logprobs,
)
from tailrl.config.arm import Clip, Correction
from tailrl.config.sampler import Disturbance
from tailrl.config.vocabulary import Vocabulary
from tailrl.runtime.errors import StudyError

MIN_P = Vocabulary(rule="min_p", rho="e-2")
N, L, V = 3, 5, 7
LENGTHS = (5, 1, 3)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, L, V, generator=generator, requires_grad=True)
    tokens = torch.randint(V, (N, L), generator=generator)
    mask = torch.arange(L) < torch.tensor(LENGTHS)[:, None]
    infer = (logits.detach() + 0.1).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1) - 0.05
    # What lies under the padding must not matter.
    infer = torch.where(mask, infer, torch.nan)
    return {
        "logits_NLV": logits,
        "tokens_NL": tokens,
        "mask_NL": mask,
        "logp_sampler_NL": infer,
        "advantage_N": torch.tensor([1.0, -0.5, 2.0]),
    }


@pytest.mark.parametrize("clip", [None, Clip(ratio="recompute")])
@pytest.mark.parametrize("correction", [None, Correction(sequence="mis"), Correction(token="tis")])
@pytest.mark.parametrize("vocabulary", [Vocabulary(), MIN_P])
def test_a_padded_batch_has_the_loss_of_its_responses(
    vocabulary: Vocabulary, correction: Correction | None, clip: Clip | None
) -> None:
    given = batch()
    loss, metrics = batch_loss(**given, vocabulary=vocabulary, correction=correction, clip=clip)
    (found,) = torch.autograd.grad(loss, given["logits_NLV"])
    assert not found[~given["mask_NL"]].any()
    expected, whole, infer = torch.zeros(()), [], []
    for n, length in enumerate(LENGTHS):
        part = slice(length)
        rows = given["logits_NLV"][n, part]
        scored = token_logprobs(rows, given["tokens_NL"][n, part], vocabulary.rule, vocabulary.threshold(V))
        advantage, of = given["advantage_N"][n].expand(length), torch.zeros(length, dtype=torch.int64)
        own = given["logp_sampler_NL"][n, part]
        expected = expected + surrogate(scored, own, advantage, of, 1, N, correction or Correction(), clip).loss
        whole += [scored.in_set()]
        infer += [own]
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(expected, given["logits_NLV"])
    torch.testing.assert_close(found, gradient)
    inside = ~torch.cat(whole).isneginf()
    assert metrics["kl"] == pytest.approx(
        (torch.cat(infer) - torch.cat(whole))[inside].double().mean().item(), rel=1e-5
    )


def test_old_log_probs_move_the_ratio_and_the_weights() -> None:
    given = batch()
    old = torch.where(given["mask_NL"], given["logp_sampler_NL"] + 0.02, torch.nan)
    loss, metrics = batch_loss(**given, vocabulary=Vocabulary(), clip=Clip(ratio="decoupled"), logp_old_NL=old)
    assert loss.isfinite() and metrics["kl"] == pytest.approx(-0.02, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_NL": torch.zeros(N, L)}, "the mask leaves no token"),
        ({"mask_NL": torch.ones(N, L + 1)}, r"tokens_NL is \[3, 5\]; mask_NL is \[3, 6\], not \[3, 5\]$"),
        ({"mask_NL": torch.full((N, L), 2)}, "mask must be bool, or 0 and 1"),
        ({"advantage_N": torch.ones(N + 1)}, r"advantage_N is \[4\], not \[3\]$"),
        ({"advantage_N": torch.ones(N, L)}, r"advantage_N is \[3, 5\], not \[3\]$"),
        ({"logits_NLV": torch.ones(L, V)}, r"logits_NLV is \[5, 7\], not \[3, 5, 7\]$"),
        ({"logits_NLV": torch.ones(N, L - 1, V)}, r"logits_NLV is \[3, 4, 7\], not \[3, 5, 7\]$"),
        ({"tokens_NL": torch.ones(L, dtype=torch.int64)}, r"tokens_NL is \[5\], not \[N, L\]; "),
        ({"tokens_NL": torch.full((N, L), V)}, "tokens must be int64, from 0 to 6; leave out padding"),
        ({"logp_sampler_NL": torch.full((N, L), math.nan)}, "logp_sampler_NL holds NaN or Inf"),
        ({"vocabulary": "min_p"}, r"vocabulary: needs Vocabulary\(rule=\"min_p\", ...\), not 'min_p'"),
        (
            {"correction": {"sequence": "mis"}},
            r"correction: needs Correction\(sequence=\"mis\", ...\), not {'sequence'",
        ),
        ({"logp_sampler_NL": torch.full((N, L), 0.3)}, "one is 0.3: are these probabilities"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {**batch(), "vocabulary": MIN_P, **change}
    with pytest.raises(StudyError, match=words):
        batch_loss(**given)


# --- what the public functions refuse ------------------------------------------------------------------

LOGITS, TOKENS = torch.zeros(2, V), torch.zeros(2, dtype=torch.int64)
WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("minp", -13.0), r"there is no 'minp' \(did you mean 'min_p'\?\)"),
    (("min_p", 1e-6), r"ln ρ of the natural logarithm, at most 0, not 1e-06 \(ln 1e-06 is -13.82\)"),
    (("entropy", 3.0), "at most 0, not 3$"),
    (("min_p", math.nan), "at most 0, not nan"),
    (("min_p", None), "rule min_p needs its threshold, ln ρ"),
    (("min_p",), "rule min_p needs its threshold, ln ρ"),
    (("min_p", "e-13"), "the threshold of rule min_p is a number, ln ρ .*, not 'e-13'"),
    (("top_k", 0), "k, at least 1, not 0"),
    (("top_p", 0.0), "p, above 0 and at most 1, not 0"),
    (("top_p", 90.0), "p, above 0 and at most 1, not 90"),
]


@pytest.mark.parametrize(("rule", "words"), WRONG)
def test_a_rule_or_threshold_that_cannot_be_meant_is_refused(rule: tuple[Any, ...], words: str) -> None:
    for call in (
        lambda: safe_set(LOGITS, *rule),
        lambda: token_logprobs(LOGITS, TOKENS, *rule),
        lambda: constrained_logprobs(LOGITS, torch.zeros(V, V), TOKENS, *rule),
    ):
        with pytest.raises(StudyError, match=words):
            call()


def test_a_threshold_is_needed_only_where_something_is_pruned() -> None:
    assert token_logprobs(LOGITS, TOKENS, "full").kept_vocab_T.tolist() == [V, V]
    with pytest.raises(StudyError, match="needs its threshold"):
        token_logprobs(LOGITS, TOKENS, "min_p")


def test_padded_logits_are_told_what_to_do() -> None:
    for call in (token_logprobs, lambda *given: constrained_logprobs(given[0], torch.zeros(V, V), *given[1:])):
        with pytest.raises(StudyError, match=r"of a padded batch take x\[mask\], or call batch_loss"):
            call(torch.zeros(N, L, V), torch.zeros(N, L, dtype=torch.int64), "full")


def test_probabilities_are_no_log_probs() -> None:
    given = torch.tensor([0.2, 0.9]), torch.tensor([-0.1, -0.2])
    for pair in (given, given[::-1]):
        with pytest.raises(StudyError, match=r"one is 0\.9: are these probabilities"):
            log_ratio_metrics(*pair, torch.tensor([0, 0]), 1)


def test_corrections_need_no_movement_before_the_first_update() -> None:
    inputs = torch.tensor([0.1, -0.3]), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 0]), 1
    rejection = Correction(sequence="reject_k1", rejects="r_ppo", sequence_threshold=1e-6)
    assert not correct(*inputs, rejection).rejected_N.any()
    assert correct(*inputs, Correction(sequence="is")).weight_T.tolist() == pytest.approx([math.exp(-0.2)] * 2)


@pytest.mark.parametrize("wrong", [-100, V])
def test_a_token_that_is_not_there_is_refused(wrong: int) -> None:
    tokens = torch.tensor([0, wrong])
    for call in (
        lambda: token_logprobs(LOGITS, tokens, "full"),
        lambda: constrained_logprobs(LOGITS, torch.zeros(V, V), tokens, "full"),
        lambda: token_logprobs(LOGITS, TOKENS.float(), "full"),
    ):
        with pytest.raises(StudyError, match="tokens must be int64, from 0 to 6; leave out padding, such as -100"):
            call()


def test_a_head_and_a_temperature_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StudyError, match=r"hidden states \[2, 7\] and the head's weight \[7, 3\] do not fit"):
        constrained_logprobs(LOGITS, torch.zeros(V, 3), TOKENS, "full")
    with pytest.raises(StudyError, match="temperature must be above 0, not 0"):
        constrained_logprobs(LOGITS, torch.zeros(V, V), TOKENS, "full", temperature=0.0)


T = 4
PACKED = {"delta_T": torch.zeros(T), "outside_T": torch.zeros(T, dtype=torch.bool), "sequence_T": torch.arange(T) // 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {name: given[None] for name, given in PACKED.items()},
            r"one entry a token is needed, \[T\], not sequence_T \[1, 4\]",
        ),
        ({"outside_T": torch.zeros(2, dtype=torch.bool)}, r"outside_T \[2\]"),
        ({"sequence_T": torch.zeros(T)}, "whole numbers from 0 to 1"),
        ({"sequence_T": torch.arange(T)}, "sequence_T must hold each token's sequence, whole numbers from 0 to 1"),
        ({"outside_T": torch.zeros(T, dtype=torch.int64)}, "outside_T must be bool, not int64"),
        ({"correction": "mis"}, r"correction: needs Correction\(sequence=\"mis\", ...\), not 'mis'"),
    ],
)
def test_what_is_not_packed_is_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {**PACKED, "count": 2, "correction": Correction(), **change}
    with pytest.raises(StudyError, match=words):
        correct(**given)


def test_metrics_and_losses_of_what_is_not_packed_are_refused() -> None:
    logp, sequence = torch.full((N, L), -1.0), torch.zeros(N, L, dtype=torch.int64)
    with pytest.raises(StudyError, match=r"of a padded batch take x\[mask\]"):
        log_ratio_metrics(logp, logp, sequence, N)
    with pytest.raises(StudyError, match=r"logp_sampler_T \[4\]"):
        log_ratio_metrics(logp[0], logp[0, :4], sequence[0], 1)
    scored = token_logprobs(LOGITS, TOKENS, "full")
    with pytest.raises(StudyError, match=r"advantage_T \[1\]"):
        surrogate(scored, -torch.ones(2), torch.ones(1), TOKENS, 1, 1, Correction(), None)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("shape", [(8,), (8, 1), (2, 2, 2)])
def test_rewards_of_another_shape_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(StudyError, match=r"rewards must be \[P, G\], of G ≥ 2 responses"):
        ESTIMATORS[name](torch.ones(shape))


def test_a_disturbance_needs_a_seed_a_row() -> None:
    with pytest.raises(StudyError, match="2 rows have 1 seeds and 2 positions"):
        disturb(LOGITS, [1], [0, 1], Disturbance(noise=0.1))
