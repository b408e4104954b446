"""The safe vocabulary and the policy constrained to it: the definition, plain and slow.

For logits z (after temperature) and a threshold ρ, the safe set of a state is

    V_S = {a : π(a) ≥ ρ max_k π(k)} = {a : z_a ≥ max_k z_k + ln ρ}                       (Section 5)

and the constrained policy is π^mp(a) = π(a) 1[a ∈ V_S] / Z with the kept mass Z = Σ_{V_S} π. Everything
here is a sum over V_S alone, so it is invariant to a shift of the logits and needs no fill value. The set is
chosen without gradient: inside it the gradient is that of a softmax over V_S, outside it is exactly zero.

The paper writes −50 into the masked logits instead. For a sampled token inside the set that is the same to
float precision; for one outside it is not (its gradient pushes every safe logit down): `paper_fill`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PAPER_FILL = -50.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the trainer knows of each of T sampled tokens; float32, nats; only `logp_T` carries a gradient.

    Attributes:
        logp_T: log π^mp of the sampled token; 0 where it lies outside the set (see `outside_T`), unless the
            paper's fill scores it.
        logp_full_T: log π of the sampled token under the unmasked distribution.
        log_kept_T: log Z, the mass of the safe set.
        kept_vocab_T: int64, |V_S|.
        entropy_T: entropy of the constrained distribution.
        outside_T: bool, whether the sampled token lies outside the safe set.
    """

    logp_T: Tensor
    logp_full_T: Tensor
    log_kept_T: Tensor
    kept_vocab_T: Tensor
    entropy_T: Tensor
    outside_T: Tensor


def safe_set(logits_TV: Tensor, log_rho: float | Tensor | None) -> Tensor:
    """Which tokens are safe: bool [T, V]; all of them where `log_rho` is None.

    `log_rho` is ln ρ ≤ 0, one for all rows or, [T, 1], one for each; −inf keeps every token.
    """
    if log_rho is None:
        return torch.ones_like(logits_TV, dtype=torch.bool)
    with torch.no_grad():
        return logits_TV >= logits_TV.amax(-1, keepdim=True) + log_rho


def token_logprobs(
    logits_TV: Tensor, tokens_T: Tensor, log_rho: float | None, paper_fill: bool = False
) -> TokenLogprobs:
    """Constrained log-probabilities of the sampled tokens.

    Args:
        logits_TV: float32 [T, V], already divided by the temperature.
        tokens_T: int64 [T], the sampled tokens.
        log_rho: ln ρ; None for the full vocabulary.
        paper_fill: score a token outside the set as the paper does, with a logit of −50 in a softmax over
            the filled logits, rather than leave it out.
    """
    safe_TV = safe_set(logits_TV, log_rho)
    chosen_T = logits_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    outside_T = ~safe_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    log_sum_safe_T = logits_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1)
    if paper_fill:
        filled_TV = logits_TV.masked_fill(~safe_TV, PAPER_FILL)
        logp_T = filled_TV.gather(-1, tokens_T[:, None]).squeeze(-1) - filled_TV.logsumexp(-1)
    else:
        # `where` on the logit, not on the difference: an outside token must send no gradient to the sum.
        logp_T = torch.where(outside_T, 0.0, chosen_T - log_sum_safe_T)
    with torch.no_grad():
        log_sum_T = logits_TV.logsumexp(-1)
        # −Σ p log p over the safe set, where a token of probability 0 contributes 0.
        log_probs_TV = (logits_TV - log_sum_safe_T[:, None]).masked_fill(~safe_TV, -torch.inf)
        entropy_T = torch.special.entr(log_probs_TV.exp()).sum(-1)
    return TokenLogprobs(
        logp_T=logp_T,
        logp_full_T=(chosen_T - log_sum_T).detach(),
        log_kept_T=(log_sum_safe_T - log_sum_T).detach(),
        kept_vocab_T=safe_TV.sum(-1),
        entropy_T=entropy_T.detach(),
        outside_T=outside_T,
    )
