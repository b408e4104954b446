"""KL(π_θ ‖ π_ref) from a reference policy, estimated at sampled tokens, in the loss or in the reward.

    log r = log π_ref(y_t|s_t) − log π_θ(y_t|s_t);   k1 = −log r,   k2 = (log r)²/2,   k3 = r − 1 − log r

The three estimates are Schulman's (http://joschu.net/blog/kl-approx.html, 2020); k1 and k3 are unbiased as values. As
gradients they are not alike (arXiv 2506.09477, 2512.21852), with expectations under π_θ in a state:

    loss, k1:    E[∇ log π_θ] = 0: no penalty, refused
    loss, k2:    E[−log r ∇ log π_θ] = ∇ KL(π_θ ‖ π_ref) of that state
    loss, k3:    E[(1 − r) ∇ log π_θ] = ∇ KL(π_ref ‖ π_θ) of that state: the other direction, and the field's default
                 (GRPO, arXiv 2402.03300); both agree to first order near the reference
    reward, k1:  −β Σ_t k1 joins the reward: the gradient of the whole responses' KL, as in RLOO (arXiv 2402.14740)
    reward, k3:  ∇ KL(π_θ ‖ π_ref) − ∇ KL(π_ref ‖ π_θ), which vanishes to first order near the reference: refused

A state's gradient leaves out that the policy chooses its later states; the reward's does not. π_θ is the constrained
policy and π_ref the reference on all tokens, at the same temperature. A sampled token outside V_S counts nothing. The
expectations are those of a sampler equal to π_θ: no weight corrects the term for the mismatch, as in verl and TRL.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tailrl.config.reference_kl import ReferenceKL
from tailrl.objective.kl_estimates import k1, k2, k3
from tailrl.objective.sequences import check_packed, sequence_sum

ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def token_kl(name: str, logp_T: Tensor, logp_ref_T: Tensor, outside_T: Tensor) -> Tensor:
    """The estimate of each token, [T] nats, with the gradient of `logp_T`; 0 outside the safe set.

    Args:
        name: k1, k2 or k3.
        logp_T: [T] nats, log π_θ^mp.
        logp_ref_T: [T] nats, log π_ref over all tokens.
        outside_T: bool [T], y_t ∉ V_S.
    """
    ratio_T = torch.where(outside_T, 0.0, logp_ref_T.detach() - logp_T)
    return ESTIMATES[name](ratio_T)


def kl_loss(
    settings: ReferenceKL, logp_T: Tensor, logp_ref_T: Tensor, outside_T: Tensor, step_sequences: int
) -> Tensor:
    """β (1/B) Σ_t k(t), a scalar with gradient, to be added to the loss; B is all sequences of the step."""
    terms_T = token_kl(settings.estimator, logp_T, logp_ref_T, outside_T)
    return settings.coefficient * terms_T.sum() / step_sequences


def reward_penalty(
    settings: ReferenceKL, logp_T: Tensor, logp_ref_T: Tensor, outside_T: Tensor, sequence_T: Tensor, sequences: int
) -> Tensor:
    """β Σ_t k(t) of each of N sequences, [N], without gradient, to be subtracted from its reward.

    Raises:
        StudyError: not one entry a token, or no such sequence.
    """
    check_packed(sequences, sequence_T, logp_T=logp_T, logp_ref_T=logp_ref_T, outside_T=outside_T)
    terms_T = token_kl(settings.estimator, logp_T.detach(), logp_ref_T, outside_T)
    return settings.coefficient * sequence_sum(terms_T, sequence_T, sequences)
