"""Constrained log-probs of logits, as verl's engines ask for them: rows of a whole micro-batch at once."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tailrl.objective.safe_set import PAPER_FILL, Columns, at_least_float32, token_logprobs

# Log-prob of a token outside the set, nats. Two of verl's losses multiply by the mask, and −inf × 0 would be NaN.
FILL = PAPER_FILL

LOGITS_A_CHUNK = 2**26  # computed with at once: 256 MB in float32, a few times


@dataclass(frozen=True, slots=True)
class Scores(Columns):
    """Of T tokens, float32 or float64; only `logp_T` carries a gradient."""

    logp_T: Tensor  # nats, log π^mp; FILL outside the set
    log_kept_T: Tensor  # nats, log Z
    set_size_T: Tensor  # |V_S|
    log_top_T: Tensor  # nats, the largest log π^mp at the token's position


def score_logits(logits_TV: Tensor, tokens_T: Tensor, log_rho: float) -> Scores:
    """What `token_logprobs` gives by min-p, in chunks of rows; a token outside the set has no gradient.

    Args:
        logits_TV: floating [T, V], already divided by the temperature.
        tokens_T: int64 [T].
        log_rho: ln ρ.

    Raises:
        NumericalError: a logit is NaN or +inf, or a row has no finite one.
    """
    # One split: its backward writes one gradient [T, V], where a slice a chunk would add up as many.
    size = max(1, LOGITS_A_CHUNK // logits_TV.shape[-1])
    chunks = zip(torch.split(logits_TV, size), torch.split(tokens_T, size), strict=True)
    return Scores.joined([_in_chunk(logits_CV, tokens_C, log_rho) for logits_CV, tokens_C in chunks])


def _in_chunk(logits_CV: Tensor, tokens_C: Tensor, log_rho: float) -> Scores:
    """Scores of a chunk; the backward computes it again, so that the sets of one chunk alone are in memory."""
    if not (torch.is_grad_enabled() and logits_CV.requires_grad):
        return _scores(logits_CV, tokens_C, log_rho)
    again: Any = checkpoint(_scores, logits_CV, tokens_C, log_rho, use_reentrant=False, preserve_rng_state=False)
    return cast(Scores, again)


def _scores(logits_CV: Tensor, tokens_C: Tensor, log_rho: float) -> Scores:
    # Autocast would compute some sums in 16 bits on a CPU.
    with torch.autocast(logits_CV.device.type, enabled=False):
        scored = token_logprobs(logits_CV, tokens_C, "min_p", log_rho)
        top_C = at_least_float32(logits_CV.detach().amax(-1))
        chosen_C = at_least_float32(logits_CV.detach().gather(-1, tokens_C[:, None]).squeeze(-1))
    return Scores(
        logp_T=torch.where(scored.outside_T, FILL, scored.logp_T),
        log_kept_T=scored.log_kept_T,
        set_size_T=scored.kept_vocab_T.to(scored.log_kept_T.dtype),
        log_top_T=top_C - chosen_C + scored.logp_full_T - scored.log_kept_T,
    )
