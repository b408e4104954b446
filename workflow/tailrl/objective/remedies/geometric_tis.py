"""A response's weight by the geometric mean of its ratios, truncated."""

from torch import Tensor

from tailrl.objective.corrections import Judged, judge
from tailrl.objective.sequences import sequence_mean


def weigh(delta_T: Tensor, sequence_T: Tensor, count: int, threshold: float) -> Judged:
    """w = min(exp(mean_t Δ_t), C): AReaL 1.0.4's level sequence with action clamp, ROLL's weight_type geometric."""
    weight_N = sequence_mean(delta_T, sequence_T, count).exp().clamp(max=threshold)
    return judge(weight_N, weight_N.isnan())
