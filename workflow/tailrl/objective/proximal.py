"""A-3PO: the proximal policy's log-probs without a forward pass, from the versions of the weights (arXiv 2512.06547).

    log π_prox = log π_b + α (log π_θ − log π_b),   α = (v_prox − v_b) / (v_θ − v_b),   v_prox = v_θ − 1

With the age d = v_θ − v_b of a sample α is (d − 1)/d, and 0 for a fresh one. As `compute_prox_logp_approximations` of
AReaL 1.0.4 has it, method loglinear.
"""

import torch
from torch import Tensor

from tailrl.runtime.errors import DataError


def interpolation(age_T: Tensor) -> Tensor:
    """α of each token, [T], from 0 to 1; `age_T`: [T], how many versions the sampler is behind, at least 0."""
    return torch.where(age_T > 0, (age_T - 1) / age_T.clamp(min=1), torch.zeros_like(age_T)).clamp(0, 1)


def proximal_logprobs(logp_T: Tensor, logp_infer_T: Tensor, age_T: Tensor | None) -> Tensor:
    """log π_prox of each token, [T] nats, without gradient.

    Args:
        logp_T: [T] nats, the policy's.
        logp_infer_T: [T] nats, the sampler's.
        age_T: [T], see `interpolation`.

    Raises:
        StudyError: no ages.
    """
    if age_T is None:
        raise DataError("clip.proximal: loglinear needs the ages of the samples, in versions of the weights")
    return logp_infer_T + interpolation(age_T.to(logp_T.dtype)) * (logp_T.detach() - logp_infer_T)
