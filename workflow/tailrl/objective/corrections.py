"""Corrections: stop-gradient weights on whole sequences, from the log-ratio of trainer to sampler.

Per token Δ_t = log π_train − log π_infer under the distributions that the arm's objective is about (the
masked ones, for a pruned vocabulary); per sequence Δ_y = Σ_t Δ_t. A sampled token outside the trainer's set
has trainer probability 0, hence ratio 0: any ratio or veto gives its sequence weight 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrl.settings import Correction


@dataclass(frozen=True, slots=True)
class SequenceWeights:
    """Weights of N sequences; all float32 or bool [N], none carries a gradient.

    Attributes:
        raw_N: exp(Δ_y) before clipping, rejection or veto; 0 where a token lies outside the trainer's set.
        weight_N: what multiplies the sequence's loss.
        rejected_N: sequences that the correction's threshold rejects.
        vetoed_N: sequences that the veto discards.
    """

    raw_N: Tensor
    weight_N: Tensor
    rejected_N: Tensor
    vetoed_N: Tensor


def sequence_sum(values_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Sum of per-token values [T] over each of `count` sequences: [N]."""
    return torch.zeros(count, dtype=values_T.dtype, device=values_T.device).index_add(0, sequence_T, values_T)


def sequence_any(flags_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Whether any token of each of `count` sequences carries the flag: bool [N]."""
    return sequence_sum(flags_T.float(), sequence_T, count) > 0


@torch.no_grad()
def sequence_weights(
    delta_T: Tensor, outside_T: Tensor, sequence_T: Tensor, count: int, correction: Correction
) -> SequenceWeights:
    """The weights that `correction` gives to the sequences of a micro-batch.

    Args:
        delta_T: float32 [T], log π_train − log π_infer of each token; ignored where outside.
        outside_T: bool [T], the token lies outside the trainer's safe set.
        sequence_T: int64 [T], the sequence that each token belongs to.
        count: N; a sequence without a token gets weight 1 (an empty product).
        correction: which weight, which threshold, which veto.
    """
    outside_N = sequence_any(outside_T, sequence_T, count)
    delta_N = sequence_sum(delta_T.masked_fill(outside_T, 0.0), sequence_T, count)
    raw_N = delta_N.exp().masked_fill(outside_N, 0.0)
    none_N = torch.zeros_like(outside_N)
    rejected_N = raw_N > correction.threshold if correction.weight == "mis" else none_N
    vetoed_N = none_N
    if correction.veto is not None:
        small_T = (delta_T < torch.tensor(correction.veto).log()) | outside_T
        vetoed_N = sequence_any(small_T, sequence_T, count)
    weight_N = raw_N if correction.weight == "mis" else torch.ones_like(raw_N)
    return SequenceWeights(raw_N, weight_N.masked_fill(rejected_N | vetoed_N, 0.0), rejected_N, vetoed_N)
