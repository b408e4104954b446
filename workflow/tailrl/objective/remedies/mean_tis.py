"""A response's weight by the mean of its tokens' ratios, truncated."""

from torch import Tensor

from tailrl.objective.corrections import Judged, judge
from tailrl.objective.sequences import sequence_mean


def weigh(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """w = min(mean_t exp(Δ_t), C): ms-swift 4.6.0's sequence_truncate; 1 for a response without a token."""
    weight_N = sequence_mean(delta_T.exp(), sequence_T, count).clamp(max=threshold)
    empty_N = sequence_mean(delta_T.new_ones(len(delta_T)), sequence_T, count) == 0
    return judge(weight_N.masked_fill(empty_N, 1.0), empty_N.new_zeros(count))
