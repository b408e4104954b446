"""Estimates of a KL divergence at sampled tokens, from log-ratios: of tensors with their gradient, and of arrays.

    r = p/q, y ~ q:   K1 = −log r,   K2 = (log r)²/2,   K3 = r − 1 − log r

Means of K1 and K3 over tokens that q sampled are unbiased for KL(q ‖ p) (http://joschu.net/blog/kl-approx.html, 2020).
With p the trainer and q the sampler they measure the mismatch; with p a reference policy, the distance from it.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Values = TypeVar("Values", "Tensor", NDArray[np.float64])  # log-ratios in nats, of any shape


def k1(log_ratio: Values) -> Values:
    """K1 = −log r, of either sign."""
    return -log_ratio


def k2(log_ratio: Values) -> Values:
    """K2 = (log r)²/2 ≥ 0."""
    return log_ratio**2 / 2


def k3(log_ratio: Values) -> Values:
    """K3 = r − 1 − log r ≥ 0."""
    values: Any = log_ratio
    # A tensor's own method keeps the gradient.
    estimate: Values = (values.expm1() if hasattr(values, "expm1") else np.expm1(values)) - values
    return estimate
