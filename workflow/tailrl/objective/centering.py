"""Score centering: the expectation, under the sampler, of a sampled token's gradient, to be subtracted from it.

With q the sampler's distribution of a state, p the trainer's and w(v) a token's stop-gradient weight, the drift
E_q[A] E_q[w ∇ log p] is a part of the policy gradient that pulls the trainer towards the sampler. Subtracting

    A Σ_v q_v w_v ∇ log p_v

from A w ∇ log p(y) removes it, and leaves the covariance (arXiv 2609.20807). The top-k form knows q of the sampler's k
most probable tokens alone, H, and takes the tail for ρ p with ρ = (1 − Σ_H q) / (1 − Σ_H p). Since Σ_v p_v ∇ log p_v is
0, the tail then sends −α Σ_H p_v ∇ log p_v, with α = ρ w at the ratio 1/ρ. Both as NeMo-RL's guide "Score Centering"
and `compute_score_centering_term` describe it.

What drops a whole response (a veto, a rejection) multiplies a token's term by a chance that depends on the tokens after
it. The expectation over one state does not know it, and a drift stays: settings refuse it. A sampled token outside the
trainer's set is dropped alone, which the expectation knows.
"""

import torch
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.objective.corrections import token_weight

LEAST_TAIL = 1e-6
"""NeMo-RL's lower bound of the trainer's tail mass."""


def expected_score(logp_TV: Tensor, logq_TV: Tensor, correction: Correction) -> Tensor:
    """Σ_v sg(c_v) log p_v of each state, [T], whose gradient is E_q[w ∇ log p], exact or in the top-k form.

    Args:
        logp_TV: [T, V] nats with gradient, the trainer's constrained distribution; −inf outside its set.
        logq_TV: [T, V] nats, the sampler's, without gradient; −inf outside its set.
        correction: its token weight, and the form of `centering`.
    """
    with torch.no_grad():
        weight_TV = _weights(logp_TV - logq_TV, correction)
        q_TV, p_TV = logq_TV.exp(), logp_TV.exp()
        # A weight that overflows is e^Δ itself: q w = p. What the sampler never draws has no part in its expectation.
        mass_TV = torch.where(weight_TV.isinf(), p_TV, q_TV * weight_TV).masked_fill(logq_TV.isneginf(), 0.0)
        if correction.centering == "top_k":
            head_TV = _head(logq_TV, correction.centering_k or 1)
            lack_T, tail_T = ((x_TV * head_TV).sum(-1).neg().add(1).clamp(min=0) for x_TV in (q_TV, p_TV))
            rho_T = lack_T / tail_T.clamp(min=LEAST_TAIL)
            alpha_T = torch.where(rho_T > 0, rho_T * _weights(-rho_T.log(), correction), 0.0)
            mass_TV = head_TV * (mass_TV - alpha_T[:, None] * p_TV)
        # A token that the trainer gives no probability has no gradient.
        mass_TV = mass_TV.masked_fill(logp_TV.isneginf(), 0.0)
    return (mass_TV * logp_TV.masked_fill(logp_TV.isneginf(), 0.0)).sum(-1)


def _weights(ratio: Tensor, correction: Correction) -> Tensor:
    """The token weight at these log-ratios; 1 without one."""
    if correction.token == "none":
        return torch.ones_like(ratio)
    return token_weight(correction.token)(ratio, correction.token_threshold, correction.token_lower)[0]


def _head(logq_TV: Tensor, k: int) -> Tensor:
    """The k most probable tokens of each state, bool [T, V]."""
    chosen_TK = logq_TV.topk(min(k, logq_TV.shape[-1]), dim=-1).indices
    return torch.zeros_like(logq_TV, dtype=torch.bool).scatter_(-1, chosen_TK, True)
