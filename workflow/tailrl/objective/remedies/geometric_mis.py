"""A response's weight by the geometric mean of its ratios, masked."""

from torch import Tensor

from tailrl.objective.corrections import Judged, judge
from tailrl.objective.sequences import sequence_mean


def weigh(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """w = exp(mean_t Δ_t) where at most C, else 0: AReaL 1.0.4's level sequence with action mask."""
    weight_N = sequence_mean(delta_T, sequence_T, count).exp()
    return judge(weight_N, weight_N > threshold)
