"""The trainer's constrained log-probs with batch-invariant operators: what the exact engine samples with."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tailrl.config.sampler import Disturbance
from tailrl.kernels.batch_invariant import logit_chunks, pad_rows, product
from tailrl.objective.disturbance import UNDISTURBED, disturb
from tailrl.objective.safe_set import TokenLogprobs, token_logprobs

# --- logits and log-probs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scoring:
    """How hidden states become log-probs.

    Attributes:
        rule: name of the safe set's rule.
        temperature: the logits are divided by it.
        paper_fill: see `vocabulary.token_logprobs`.
        disturbance: of the logits, before the safe set is chosen.
    """

    rule: str
    temperature: float = 1.0
    paper_fill: bool = False
    disturbance: Disturbance = UNDISTURBED


def head_logits(
    hidden_RH: Tensor, weight_VH: Tensor, scoring: Scoring, seeds: Sequence[int], places: Sequence[int]
) -> Tensor:
    """float32 logits [R, V] after temperature and disturbance.

    Args:
        hidden_RH: floating [R, H], last hidden states, padded to a number of rows that is exact: see `row_multiple`.
        weight_VH: floating [V, H], the head's weight.
        scoring: temperature and disturbance.
        seeds: of each row's response; none for the padding.
        places: which token of its response each row predicts, from 0; likewise.
    """
    logits_RV = product(hidden_RH, weight_VH).float().div_(scoring.temperature)
    missing = [0] * (len(logits_RV) - len(seeds))
    return disturb(logits_RV, [*seeds, *missing], [*places, *missing], scoring.disturbance)


def exact_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    tokens_T: Tensor,
    threshold_T1: Tensor,
    scoring: Scoring,
    seeds: Sequence[int],
    places: Sequence[int],
) -> TokenLogprobs:
    """`vocabulary.token_logprobs` from hidden states, in chunks of rows, each row's result its own.

    Args:
        hidden_TH: floating [T, H], last hidden states.
        weight_VH: floating [V, H], the head's weight.
        tokens_T: int64, the sampled tokens.
        threshold_T1: number of the safe set's rule for each row: ln ρ, k or p.
        scoring: the rest of what is scored, and how.
        seeds: see `head_logits`.
        places: likewise.
    """
    parts = []
    for rows in logit_chunks(len(tokens_T), len(weight_VH)):
        logits_RV = head_logits(pad_rows(hidden_TH[rows]), weight_VH, scoring, seeds[rows], places[rows])
        chosen_R, threshold_R1 = pad_rows(tokens_T[rows]), pad_rows(threshold_T1[rows])
        part = token_logprobs(logits_RV, chosen_R, scoring.rule, threshold_R1, scoring.paper_fill)
        parts.append(part.first(len(tokens_T[rows])))
    return TokenLogprobs.joined(parts)
