"""The trainer's constrained log-probs with batch-invariant operators, with which the exact engine samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tailrl.config.sampler import Disturbance
from tailrl.kernels.batch_invariant import logit_chunks, pad_rows, product
from tailrl.objective.disturbance import UNDISTURBED, disturb
from tailrl.objective.safe_set import TokenLogprobs, at_least_float32, token_logprobs


@dataclass(frozen=True, slots=True)
class Scoring:
    """How hidden states become log-probs."""

    rule: str  # a key of `safe_set.RULES`
    temperature: float = 1.0  # divides the logits
    paper_fill: bool = False  # see `safe_set.token_logprobs`
    disturbance: Disturbance = UNDISTURBED  # of the logits, before the safe set is chosen


def head_logits(
    hidden_RH: Tensor, weight_VH: Tensor, scoring: Scoring, seeds: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Logits [R, V] after temperature and disturbance: float32, or float64 where the inputs are.

    The product has the inputs' format, in the engine and in the trainer alike; training hands over float32.

    Args:
        hidden_RH: floating [R, H], last hidden states, padded to a multiple of `row_multiple` rows.
        weight_VH: floating [V, H], the head's weight.
        scoring: temperature and disturbance.
        seeds: of each row's response, without the padding.
        positions: position in its response of the token that each row predicts, from 0; likewise.
    """
    logits_RV = at_least_float32(product(hidden_RH, weight_VH)).div_(scoring.temperature)
    missing = [0] * (len(logits_RV) - len(seeds))
    return disturb(logits_RV, [*seeds, *missing], [*positions, *missing], scoring.disturbance)


def chunked_logits(
    hidden_TH: Tensor, weight_VH: Tensor, scoring: Scoring, seeds: Sequence[int], positions: Sequence[int]
) -> Iterator[tuple[slice, Tensor]]:
    """`head_logits` of some rows at a time, each with its slice of the T rows; the logits of padding come last."""
    for rows in logit_chunks(len(hidden_TH), len(weight_VH), weight_VH.is_cuda):
        yield rows, head_logits(pad_rows(hidden_TH[rows]), weight_VH, scoring, seeds[rows], positions[rows])


def exact_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    tokens_T: Tensor,
    threshold_T1: Tensor,
    scoring: Scoring,
    seeds: Sequence[int],
    positions: Sequence[int],
) -> TokenLogprobs:
    """Batch-invariant `safe_set.token_logprobs` from hidden states, in chunks of rows.

    Args:
        hidden_TH: floating [T, H], last hidden states.
        weight_VH: floating [V, H], the head's weight.
        tokens_T: int64, the sampled tokens.
        threshold_T1: each row's ln ρ, k or p, by the rule.
        scoring: rule, temperature, fill and disturbance.
        seeds: see `head_logits`.
        positions: likewise.

    Raises:
        NumericalError: a logit is NaN or +inf.
    """
    parts = []
    for rows, logits_RV in chunked_logits(hidden_TH, weight_VH, scoring, seeds, positions):
        chosen_R, threshold_R1 = pad_rows(tokens_T[rows]), pad_rows(threshold_T1[rows])
        part = token_logprobs(logits_RV, chosen_R, scoring.rule, threshold_R1, scoring.paper_fill)
        parts.append(part.at(slice(len(tokens_T[rows]))))
    return TokenLogprobs.joined(parts)
