"""What needs the sampler's whole distribution at every token: its set, replayed in the trainer, and score centering.

Rows go through in chunks that are computed again in the backward, so that memory does not grow with tokens times
vocabulary: of the trainer's side a few chunks' logits are held at a time. The plain definitions are
`safe_set.token_logprobs` and `centering.expected_score`.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tailrl.config.arm import Correction
from tailrl.config.vocabulary import Vocabulary
from tailrl.kernels.sizes import GPU_LOGITS_AT_ONCE, LOGITS_AT_ONCE
from tailrl.objective.centering import expected_score
from tailrl.objective.safe_set import TokenLogprobs, at_least_float32, safe_set, token_logprobs
from tailrl.runtime.heap import give_back_freed


def rows_at_once(vocabulary_size: int, gpu: bool) -> int:
    """Rows of a chunk."""
    return max(1, (GPU_LOGITS_AT_ONCE if gpu else LOGITS_AT_ONCE) // vocabulary_size)


def whole_row_scores(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    tokens_T: Tensor,
    logits_sampler_TV: Tensor,
    threshold_T1: Tensor,
    temperature: float,
    vocabulary: Vocabulary,
    correction: Correction,
) -> tuple[TokenLogprobs, Tensor | None]:
    """The trainer's log-probs on its own or the replayed set; with centering `expected_score` [T], else None.

    Args:
        hidden_TH: floating [T, H], last hidden states.
        weight_VH: floating [V, H], the head's weight.
        tokens_T: int64 [T], the sampled tokens.
        logits_sampler_TV: float [T, V], the sampler's logits after temperature and disturbance, before any mask.
        threshold_T1: ln ρ, k or p of each row, by the rule.
        temperature: divides the trainer's logits.
        vocabulary: rule and side of the safe sets.
        correction: token weight and form of the centering.

    Raises:
        NumericalError: a logit of either side is NaN or +inf.
    """
    rows = partial(_rows, temperature=temperature, vocabulary=vocabulary, correction=correction)
    size, weight_VH = rows_at_once(len(weight_VH), weight_VH.is_cuda), at_least_float32(weight_VH)
    parts = []
    for start in range(0, len(tokens_T), size):
        chosen = slice(start, start + size)
        own = (hidden_TH[chosen], weight_VH, tokens_T[chosen], logits_sampler_TV[chosen], threshold_T1[chosen])
        parts.append(checkpoint(rows, *own, use_reentrant=False))
    fields = [torch.cat(column) for column in zip(*parts, strict=True)]
    return TokenLogprobs(*fields[:-1]), None if correction.centering == "none" else fields[-1]


def _rows(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    tokens_R: Tensor,
    sampler_RV: Tensor,
    threshold_R1: Tensor,
    temperature: float,
    vocabulary: Vocabulary,
    correction: Correction,
) -> tuple[Tensor, ...]:
    """The fields of `TokenLogprobs` of some rows, and their expected score."""
    give_back_freed()  # what the chunks before this one held
    logits_RV = (hidden_RH.to(weight_VH.dtype) @ weight_VH.T) / temperature
    sampler_RV = sampler_RV.to(logits_RV)
    drawn_RV = safe_set(sampler_RV, vocabulary.sampler_rule, threshold_R1)
    safe_RV = drawn_RV
    if vocabulary.side != "replay":
        safe_RV = safe_set(logits_RV, vocabulary.trainer_rule, threshold_R1)
    scored = token_logprobs(logits_RV, tokens_R, "full", None, vocabulary.outside == "paper_fill", safe_RV)
    expected_R = torch.zeros_like(scored.logp_T)
    if correction.centering != "none":
        logp_RV, logq_RV = (
            x_RV.masked_fill(~set_RV, -torch.inf).log_softmax(-1)
            for x_RV, set_RV in ((logits_RV, safe_RV), (sampler_RV, drawn_RV))
        )
        expected_R = expected_score(logp_RV, logq_RV, correction)
    return (*(getattr(scored, name) for name in scored.__slots__), expected_R)
