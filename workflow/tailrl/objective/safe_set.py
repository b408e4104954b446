"""The safe vocabulary and the policy constrained to it: the definition, plain and slow.

For logits z (after temperature) and a threshold ρ, the safe set of a state is

    V_S = {a : π(a) ≥ ρ max_k π(k)} = {a : z_a ≥ max_k z_k + ln ρ}                       (Section 5)

and the constrained policy is π^mp(a) = π(a) 1[a ∈ V_S] / Z with the kept mass Z = Σ_{V_S} π. Every rule here is
a cut of the state's logits, V_S = {a : z_a ≥ cut}, and everything computed from it is a sum over V_S alone, so it is
invariant to a shift of the logits and needs no fill value. The set is chosen without gradient: inside it the
gradient is that of a softmax over V_S, outside it is exactly zero.

The paper writes −50 into the masked logits instead. For a sampled token inside the set that is the same to
float precision; for one outside it is not (its gradient pushes every safe logit down): `paper_fill`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

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

    def first(self, count: int) -> "TokenLogprobs":
        """Those of the first tokens alone."""
        return TokenLogprobs(*(getattr(self, field.name)[:count] for field in fields(self)))

    def split(self, counts: Sequence[int]) -> "list[TokenLogprobs]":
        """Those of the first so many tokens, of so many after them, and so on: what `joined` puts together."""
        columns = (torch.split(getattr(self, field.name), list(counts)) for field in fields(self))
        return [TokenLogprobs(*parts) for parts in zip(*columns, strict=True)]

    def in_set(self) -> Tensor:
        """[T] log π^mp, −inf where the sampled token lies outside the set, whatever the fill; without a gradient."""
        return self.logp_T.detach().masked_fill(self.outside_T, -torch.inf)

    @classmethod
    def joined(cls, parts: Sequence["TokenLogprobs"]) -> "TokenLogprobs":
        """Those of several runs of tokens, one after another."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


# --- rules: (logits [T, V], threshold) → cut [T, 1]; the threshold is one number or, [T, 1], one per row ----


def full(logits_TV: Tensor, _: float | Tensor) -> Tensor:
    """No cut: every token is safe."""
    return torch.full_like(logits_TV[:, :1], -torch.inf)


def min_p(logits_TV: Tensor, log_rho: float | Tensor) -> Tensor:
    """Tokens with at least ρ times the largest probability; `log_rho` is ln ρ ≤ 0."""
    return logits_TV.amax(-1, keepdim=True) + log_rho


def entropy(logits_TV: Tensor, log_rho: float | Tensor) -> Tensor:
    """Tokens with at least ρ times exp(−H), H the state's entropy: the cut adapts to how sure the policy is.

    exp(−H) is the geometric mean of the probabilities of what is sampled. It equals the maximum, and the rule min-p,
    where the policy is flat over its choices; where it is nearly sure but has a long tail, H is small, exp(−H) lies
    below the maximum and more of the tail stays. The most probable token is always safe, since max π ≥ exp(−H).
    """
    log_sum_T1 = logits_TV.logsumexp(-1, keepdim=True)
    log_probs_TV = logits_TV - log_sum_T1
    entropy_T1 = -(log_probs_TV.exp() * log_probs_TV.nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
    # Never above the largest logit, whatever the rounding.
    return torch.minimum(log_sum_T1 - entropy_T1 + log_rho, logits_TV.amax(-1, keepdim=True))


def top_k(logits_TV: Tensor, k: float | Tensor) -> Tensor:
    """The k most probable tokens, and those that tie with the last of them."""
    count = logits_TV.shape[-1]
    if not len(logits_TV):
        return logits_TV[:, :1]
    place_T1 = torch.as_tensor(k, device=logits_TV.device).long().clamp(1, count).expand(len(logits_TV), 1) - 1
    return logits_TV.topk(int(place_T1.max()) + 1, dim=-1).values.gather(-1, place_T1)


def top_p(logits_TV: Tensor, mass: float | Tensor) -> Tensor:
    """The fewest most probable tokens that hold at least this mass, and those that tie with the last of them."""
    sorted_TV = logits_TV.sort(-1, descending=True).values
    probs_TV = sorted_TV.softmax(-1)
    before_TV = probs_TV.cumsum(-1) - probs_TV
    kept_T1 = (before_TV < mass).sum(-1, keepdim=True).clamp(min=1)
    cut_T1 = sorted_TV.gather(-1, kept_T1 - 1)
    # All the mass is every token, whatever the rounding of the running sum.
    return torch.where(torch.as_tensor(mass, device=logits_TV.device) >= 1, -torch.inf, cut_T1)


RULES: dict[str, Callable[[Tensor, float | Tensor], Tensor]] = {
    "full": full,
    "min_p": min_p,
    "entropy": entropy,
    "top_k": top_k,
    "top_p": top_p,
}


@torch.no_grad()
def logit_cut(logits_TV: Tensor, rule: str, threshold: float | Tensor) -> Tensor:
    """The smallest safe logit of each row, [T, 1], by the rule of that name."""
    return RULES[rule](logits_TV, threshold)


def safe_set(logits_TV: Tensor, rule: str, threshold: float | Tensor) -> Tensor:
    """Which tokens are safe: bool [T, V]."""
    if rule == "full":
        return torch.ones((), dtype=torch.bool, device=logits_TV.device).expand_as(logits_TV)
    return logits_TV >= logit_cut(logits_TV, rule, threshold)


def set_size(safe_TV: Tensor, rule: str) -> Tensor:
    """|V_S| of each row, int64 [T], of the sets that the rule of that name chose."""
    if rule == "full":
        return torch.full(safe_TV.shape[:1], safe_TV.shape[1], device=safe_TV.device)
    # A sum widens its flags first: to 32 bits rather than 64, and so few at a time that they stay in a core's cache.
    parts = torch.split(safe_TV, max(1, 2**20 // max(1, safe_TV.shape[-1])))
    return torch.cat([part.sum(-1, dtype=torch.int32) for part in parts]).long()


def log_masses(logits_TV: Tensor, rule: str, threshold: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The safe set, bool [T, V], and ln Σ exp(z) over it, with gradient, and over all tokens, without: [T] each."""
    safe_TV = safe_set(logits_TV, rule, threshold)
    if rule == "full":
        log_sum_T = logits_TV.logsumexp(-1)
        return safe_TV, log_sum_T, log_sum_T.detach()
    return (
        safe_TV,
        logits_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1),
        logits_TV.detach().logsumexp(-1),
    )


def token_logprobs(
    logits_TV: Tensor, tokens_T: Tensor, rule: str, threshold: float | Tensor = 0.0, paper_fill: bool = False
) -> TokenLogprobs:
    """Constrained log-probabilities of the sampled tokens.

    Args:
        logits_TV: float32 [T, V], already divided by the temperature.
        tokens_T: int64 [T], the sampled tokens.
        rule: name of the safe set's rule.
        threshold: its number, one for all rows or [T, 1]: ln ρ, k or p.
        paper_fill: score a token outside the set as the paper does, with a logit of −50 in a softmax over
            the filled logits, rather than leave it out.
    """
    safe_TV, log_sum_safe_T, log_sum_T = log_masses(logits_TV, rule, threshold)
    chosen_T = logits_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    outside_T = ~safe_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    if paper_fill:
        filled_TV = logits_TV.masked_fill(~safe_TV, PAPER_FILL)
        logp_T = filled_TV.gather(-1, tokens_T[:, None]).squeeze(-1) - filled_TV.logsumexp(-1)
    else:
        # `where` on the logit, not on the difference: an outside token must send no gradient to the sum.
        logp_T = torch.where(outside_T, 0.0, chosen_T - log_sum_safe_T)
    with torch.no_grad():
        # −Σ p log p over the safe set, where a token of probability 0 contributes 0.
        log_probs_TV = (logits_TV - log_sum_safe_T[:, None]).masked_fill(~safe_TV, -torch.inf)
        entropy_T = torch.special.entr(log_probs_TV.exp()).sum(-1)
    return TokenLogprobs(
        logp_T=logp_T,
        logp_full_T=(chosen_T - log_sum_T).detach(),
        log_kept_T=(log_sum_safe_T - log_sum_T).detach(),
        kept_vocab_T=set_size(safe_TV, rule),
        entropy_T=entropy_T.detach(),
        outside_T=outside_T,
    )
