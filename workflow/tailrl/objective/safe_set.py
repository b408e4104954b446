"""The safe set and the policy constrained to it (arXiv 2512.23087, Section 5): the definition, plain and slow.

With logits z (after temperature) and a threshold ρ, the safe set of a state s and its constrained policy are

    V_S(s) = {a : π(a|s) ≥ ρ max_b π(b|s)} = {a : z_a ≥ max_b z_b + ln ρ}                  (min-p; ρ = e⁻¹³)
    π^mp(a|s) = π(a|s) 1[a ∈ V_S(s)] / Z(s),   Z(s) = Σ_{a ∈ V_S(s)} π(a|s)                (Z: the kept mass)

The trainer computes V_S from π_train; the sampler computes V'_S from π_infer by the same rule. Every rule here is a
cut of the logits, V_S = {a : z_a ≥ cut}, chosen without gradient. Inside V_S the gradient is a softmax's over V_S;
outside it is exactly zero. All sums run over V_S alone, so a shift of the logits changes nothing and no fill is needed.

The paper writes −50 into the masked logits instead. For a sampled token inside V_S both agree to float precision. For
one outside they differ: the paper's gradient pushes every safe logit down (`paper_fill`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Self

import torch
from torch import Tensor

from tailrl.config.messages import near
from tailrl.runtime.errors import ConfigurationError, DataError, NumericalError

PAPER_FILL = -50.0
"""The paper's logit of a masked token; −inf gives NaN gradients in bfloat16."""

NOT_FINITE = "a logit is NaN or +inf, or a row has no finite one"


# --- the safe set: rules (logits [T, V], threshold) → cut [T, 1]; one threshold for all rows or [T, 1] ---


def min_p(logits_TV: Tensor, log_rho: float | Tensor) -> Tensor:
    """DVP's rule: tokens with at least ρ times the largest probability, z_a ≥ max z + ln ρ; `log_rho` is ln ρ ≤ 0."""
    return logits_TV.amax(-1, keepdim=True) + log_rho


def entropy(logits_TV: Tensor, log_rho: float | Tensor) -> Tensor:
    """Tokens with at least ρ times exp(−H), H the state's entropy: a ρ that adapts (the paper's future work).

    exp(−H) is the geometric mean of the sampled tokens' probabilities. For a policy flat over its choices it equals
    max π, and the rule is min-p. For a nearly sure policy with a long tail it lies below max π, and more of the tail
    stays. The most probable token is always safe, since max π ≥ exp(−H).
    """
    log_sum_T1 = logits_TV.logsumexp(-1, keepdim=True)
    log_probs_TV = logits_TV - log_sum_T1
    entropy_T1 = -(log_probs_TV.exp() * log_probs_TV.nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
    # Rounding must not lift the cut above the largest logit.
    return torch.minimum(log_sum_T1 - entropy_T1 + log_rho, logits_TV.amax(-1, keepdim=True))


def top_k(logits_TV: Tensor, k: float | Tensor) -> Tensor:
    """The k most probable tokens, ties with the last included."""
    count = logits_TV.shape[-1]
    if not len(logits_TV):
        return logits_TV[:, :1]
    last_T1 = torch.as_tensor(k, device=logits_TV.device).long().clamp(1, count).expand(len(logits_TV), 1) - 1
    return logits_TV.topk(int(last_T1.max()) + 1, dim=-1).values.gather(-1, last_T1)


def top_p(logits_TV: Tensor, mass: float | Tensor) -> Tensor:
    """The fewest most probable tokens that hold at least this mass, ties with the last included."""
    sorted_TV = logits_TV.sort(-1, descending=True).values
    probs_TV = sorted_TV.softmax(-1)
    before_TV = probs_TV.cumsum(-1) - probs_TV
    kept_T1 = (before_TV < mass).sum(-1, keepdim=True).clamp(min=1)
    cut_T1 = sorted_TV.gather(-1, kept_T1 - 1)
    # Mass 1 keeps every token, although the running sum is rounded.
    return torch.where(torch.as_tensor(mass, device=logits_TV.device) >= 1, -torch.inf, cut_T1)


def full(logits_TV: Tensor, _: float | Tensor) -> Tensor:
    """Every token is safe."""
    return torch.full_like(logits_TV[:, :1], -torch.inf)


RULES: dict[str, Callable[[Tensor, float | Tensor], Tensor]] = {
    "full": full,
    "min_p": min_p,
    "entropy": entropy,
    "top_k": top_k,
    "top_p": top_p,
}
_LOG_RHO = "ln ρ of the natural logarithm, at most 0"
THRESHOLD_RANGES = {
    "min_p": (_LOG_RHO, -math.inf, 0.0),
    "entropy": (_LOG_RHO, -math.inf, 0.0),
    "top_k": ("k, at least 1", 1.0, math.inf),
    "top_p": ("p, above 0 and at most 1", 1e-300, 1.0),
}
"""What a rule's threshold means, its smallest and its largest value."""


def checked(rule: str, threshold: float | Tensor | None) -> float | Tensor:
    """The threshold, 0 for `full`; raises StudyError for an unknown rule, or a number that cannot be its threshold."""
    if rule not in RULES:
        raise ConfigurationError(f"rule: there is no {rule!r}{near(rule, RULES)}; there are {', '.join(RULES)}")
    if rule == "full":
        return 0.0
    meant, low, high = THRESHOLD_RANGES[rule]
    if threshold is None:
        raise ConfigurationError(f"rule {rule} needs its threshold, {meant}")
    if not isinstance(threshold, Tensor | Real):
        raise ConfigurationError(f"the threshold of rule {rule} is a number, {meant}, not {threshold!r}")
    if not isinstance(threshold, Tensor) and not low <= threshold <= high:  # a look into a tensor would wait for a GPU
        hint = f" (ln {threshold:g} is {math.log(threshold):.4g})" if high == 0 and threshold <= 1 else ""
        raise ConfigurationError(f"the threshold of rule {rule} is {meant}, not {threshold:g}{hint}")
    return threshold


def check_rows(rows: Tensor, tokens_T: Tensor, vocabulary_size: int) -> None:
    """Raises StudyError where rows (logits or hidden states) and tokens are not packed, or a token is impossible."""
    if rows.dim() != 2 or tokens_T.shape != rows.shape[:1]:
        raise DataError(
            f"one row a token is needed, [T, ...] and [T], not {list(rows.shape)} and {list(tokens_T.shape)}: of a "
            "padded batch take x[mask], or call batch_loss"
        )
    if tokens_T.dtype != torch.int64 or ((tokens_T < 0) | (tokens_T >= vocabulary_size)).any():
        raise DataError(f"tokens must be int64, from 0 to {vocabulary_size - 1}; leave out padding, such as -100")


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits in float32 or float64: in 16 bits a log-prob would be off by 1e-2, more than most mismatches."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def logit_cut(logits_TV: Tensor, rule: str, threshold: float | Tensor) -> Tensor:
    """The smallest safe logit of each row, [T, 1]; `rule` is a key of RULES."""
    return RULES[rule](logits_TV, threshold)


def safe_set(logits_TV: Tensor, rule: str, threshold: float | Tensor | None = None) -> Tensor:
    """1[a ∈ V_S]: bool [T, V], by one of RULES and ln ρ, k or p; −inf masks a token.

    Raises:
        StudyError: a wrong rule or threshold.
        NumericalError: a logit is NaN or +inf, or a row has no finite one.
    """
    threshold = checked(rule, threshold)
    if not logits_TV.detach().amax(-1).isfinite().all():
        raise NumericalError(NOT_FINITE)
    return _members(at_least_float32(logits_TV), rule, threshold)


def _members(logits_TV: Tensor, rule: str, threshold: float | Tensor) -> Tensor:
    """The safe set, of no token in a row of NaN: an engine's responses are kept, and their update is skipped."""
    if rule == "full":
        return torch.ones((), dtype=torch.bool, device=logits_TV.device).expand_as(logits_TV)
    return logits_TV >= logit_cut(logits_TV, rule, threshold)


def set_size(safe_TV: Tensor, rule: str) -> Tensor:
    """|V_S| of each row, int64 [T], for sets that `rule` chose."""
    if rule == "full":
        return torch.full(safe_TV.shape[:1], safe_TV.shape[1], device=safe_TV.device)
    # A sum widens its flags first. 32 bits instead of 64, and small parts, stay in a core's cache.
    parts = torch.split(safe_TV, max(1, 2**20 // max(1, safe_TV.shape[-1])))
    return torch.cat([part.sum(-1, dtype=torch.int32) for part in parts]).long()


# --- the constrained policy -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Columns:
    """Tensors with one entry for each of T tokens."""

    def at(self, rows: slice | Tensor) -> Self:
        """Some tokens, by slice, index or mask."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))

    def split(self, counts: Sequence[int]) -> list[Self]:
        """Consecutive parts with these numbers of tokens; the inverse of `joined`."""
        columns = (torch.split(getattr(self, field.name), list(counts)) for field in fields(self))
        return [type(self)(*parts) for parts in zip(*columns, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The tokens of all parts, in order."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Columns):
    """The trainer's log-probs of T sampled tokens; at least float32, nats; only `logp_T` carries a gradient."""

    logp_T: Tensor  # log π^mp(y_t|s_t); 0 outside the safe set (see `outside_T`), unless the paper's fill scores it
    logp_full_T: Tensor  # log π(y_t|s_t), unmasked
    log_kept_T: Tensor  # log Z(s_t)
    kept_vocab_T: Tensor  # int64, |V_S(s_t)|
    entropy_T: Tensor  # of π^mp
    outside_T: Tensor  # bool, y_t ∉ V_S(s_t)

    def in_set(self) -> Tensor:
        """[T] log π^mp, −inf for a token outside the set even with the paper's fill; without a gradient."""
        return self.logp_T.detach().masked_fill(self.outside_T, -torch.inf)


def log_masses(logits_TV: Tensor, rule: str, threshold: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V_S, bool [T, V]; ln Σ_{V_S} exp(z), [T], with gradient; ln Σ exp(z), [T], without. log Z is their difference."""
    safe_TV = _members(logits_TV, rule, checked(rule, threshold))
    if rule == "full":
        log_sum_T = logits_TV.logsumexp(-1)
        return safe_TV, log_sum_T, log_sum_T.detach()
    return safe_TV, logits_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1), logits_TV.detach().logsumexp(-1)


def token_logprobs(
    logits_TV: Tensor,
    tokens_T: Tensor,
    rule: str,
    threshold: float | Tensor | None = None,
    paper_fill: bool = False,
    safe_TV: Tensor | None = None,
) -> TokenLogprobs:
    """log π^mp(y_t|s_t) = z_{y_t} − ln Σ_{a ∈ V_S} exp(z_a) of the sampled tokens y_t, and what belongs to it.

    Args:
        logits_TV: floating [T, V], already divided by the temperature; computed in float32, or float64 where it is.
            −inf masks a token.
        tokens_T: int64 [T], the sampled tokens.
        rule: a key of RULES.
        threshold: ln ρ, k or p, by the rule; one for all rows or [T, 1].
        paper_fill: score a token outside V_S as the paper does, in a softmax with −50 for every masked logit.
        safe_TV: bool [T, V], a set to take in place of the rule's own: the sampler's, to be replayed.

    Raises:
        StudyError: an unknown rule, a threshold or token that is missing or impossible, or rows that are not packed.
        NumericalError: a logit is NaN or +inf, or a row or its set has no finite one.
    """
    check_rows(logits_TV, tokens_T, logits_TV.shape[-1])
    threshold = checked(rule, threshold)
    logits_TV = at_least_float32(logits_TV)
    given = safe_TV is not None
    if safe_TV is None:
        safe_TV, log_sum_safe_T, log_sum_T = log_masses(logits_TV, rule, threshold)
    else:
        log_sum_safe_T = logits_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1)
        log_sum_T = logits_TV.detach().logsumexp(-1)
    # NaN is in no safe set, so the log-probs alone would not show it. These sums are finite unless a logit is not.
    if not (log_sum_T.isfinite() & log_sum_safe_T.isfinite()).all():
        raise NumericalError(NOT_FINITE)
    chosen_T = logits_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    outside_T = ~safe_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    if paper_fill:
        filled_TV = logits_TV.masked_fill(~safe_TV, PAPER_FILL)
        logp_T = filled_TV.gather(-1, tokens_T[:, None]).squeeze(-1) - filled_TV.logsumexp(-1)
    else:
        # `where` also drops the sum's gradient, which an outside token must not send.
        logp_T = torch.where(outside_T, 0.0, chosen_T - log_sum_safe_T)
    with torch.no_grad():
        # entr(p) = −p log p, and 0 at p = 0.
        log_probs_TV = (logits_TV - log_sum_safe_T[:, None]).masked_fill(~safe_TV, -torch.inf)
        entropy_T = torch.special.entr(log_probs_TV.exp()).sum(-1)
    return TokenLogprobs(
        logp_T=logp_T,
        logp_full_T=(chosen_T - log_sum_T).detach(),
        log_kept_T=(log_sum_safe_T - log_sum_T).detach(),
        kept_vocab_T=set_size(safe_TV, "given" if given else rule),
        entropy_T=entropy_T.detach(),
        outside_T=outside_T,
    )
