"""Hypotheses on logits: what an engine does between its head and a token's log-prob. `catalogue.yaml` names them.

Each takes reduced rows and a number, and returns rows. The definitions are those of vLLM's sampler.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tailrl.explanation.rows import NEVER, Rows


def temperature(rows: Rows, value: float) -> Rows:
    """Logits divided by the temperature."""
    return rows.with_values(rows.value_TE / value)


def top_k(rows: Rows, value: float) -> Rows:
    """The k largest logits alone."""
    single_TE = torch.where(rows.weight_TE == 0, rows.value_TE, -torch.inf)
    count = min(int(value), single_TE.shape[1])
    return rows.kept(rows.value_TE >= single_TE.topk(count, -1).values[:, -1:])


def top_p(rows: Rows, value: float) -> Rows:
    """The fewest tokens, the most probable first, whose probabilities sum to p."""
    prob_TE = (rows.value_TE + rows.weight_TE).softmax(-1)
    order_TE = rows.value_TE.argsort(-1, descending=True)
    sorted_TE = prob_TE.gather(1, order_TE)
    before_TE = sorted_TE.cumsum(-1) - sorted_TE
    return rows.kept(torch.zeros_like(prob_TE, dtype=torch.bool).scatter_(1, order_TE, before_TE < value))


def min_p(rows: Rows, value: float) -> Rows:
    """Tokens with at least this share of the largest probability."""
    single_TE = torch.where(rows.weight_TE > -torch.inf, rows.value_TE, -torch.inf)
    return rows.kept(rows.value_TE >= single_TE.amax(-1, keepdim=True) + math.log(value))


def repetition_penalty(rows: Rows, value: float) -> Rows:
    """Logits of tokens in prompt or response: divided by the penalty if positive, else multiplied."""
    penalised_TE = torch.where(rows.value_TE > 0, rows.value_TE / value, rows.value_TE * value)
    return rows.with_values(torch.where(rows.before_TE, penalised_TE, rows.value_TE))


def repetition_penalty_of_response(rows: Rows, value: float) -> Rows:
    """The same for the response's tokens alone."""
    penalised_TE = torch.where(rows.value_TE > 0, rows.value_TE / value, rows.value_TE * value)
    return rows.with_values(torch.where(rows.count_TE > 0, penalised_TE, rows.value_TE))


def presence_penalty(rows: Rows, value: float) -> Rows:
    """Logits of tokens in the response minus the penalty."""
    return rows.with_values(rows.value_TE - value * (rows.count_TE > 0))


def frequency_penalty(rows: Rows, value: float) -> Rows:
    """Logits minus the penalty for each occurrence in the response."""
    return rows.with_values(rows.value_TE - value * rows.count_TE)


def softcap(rows: Rows, value: float) -> Rows:
    """c · tanh(logit / c)."""
    capped_TE = value * torch.tanh(rows.value_TE / value)
    return rows.with_values(torch.where(rows.value_TE > NEVER / 2, capped_TE, rows.value_TE))


def token_bias(token: int) -> Callable[[Rows, float], Rows]:
    """A number added to one token's logit."""
    return lambda rows, value: rows.with_values(rows.value_TE + value * (rows.id_TE == token))


def end_forbidden(rows: Rows, value: float) -> Rows:
    """No end token before the response has so many tokens."""
    early_T1 = rows.count_TE.sum(-1, keepdim=True) < value
    is_end_TE = torch.isin(rows.id_TE, torch.tensor(rows.ends, dtype=torch.int64))
    return rows.kept(~(is_end_TE & early_T1))


def padded_vocabulary(rows: Rows, value: float) -> Rows:
    """So many more tokens with a logit of 0, as rows of zeros in a padded head give."""
    extra_T1 = rows.value_TE[:, :1]
    return replace(
        rows,
        value_TE=torch.cat([rows.value_TE, torch.zeros_like(extra_T1)], 1),
        weight_TE=torch.cat([rows.weight_TE, torch.full_like(extra_T1, math.log(value))], 1),
        id_TE=torch.cat([rows.id_TE, torch.full_like(rows.id_TE[:, :1], -1)], 1),
        before_TE=torch.cat([rows.before_TE, torch.zeros_like(rows.before_TE[:, :1])], 1),
        count_TE=torch.cat([rows.count_TE, torch.zeros_like(extra_T1)], 1),
    )


def rounded_logits(rows: Rows, value: str) -> Rows:
    """Logits in another number format."""
    rounded_TE = rows.value_TE.to(getattr(torch, value)).float().clamp(min=NEVER)
    return rows.with_values(torch.where(rows.weight_TE == 0, rounded_TE, rows.value_TE))


def log_softmax_16(rows: Rows, value: str) -> Rows:
    """Logits, their log-sum-exp and the difference of the two, each in a 16-bit format.

    With `_sum` the log-sum-exp is that of the logits before they were rounded.

    Rows have no log-prob of their own: the other tokens' mass becomes what gives the sampled token its rounded one.
    """
    name, _, exact_sum = value.partition("_")
    dtype = getattr(torch, name)
    rounded = rounded_logits(rows, name)
    summed = rows if exact_sum else rounded
    target_T1 = rows.target_T[:, None]
    logit_T1 = rounded.value_TE.gather(1, target_T1)
    norm_T1 = (summed.value_TE + summed.weight_TE).logsumexp(-1, keepdim=True).to(dtype)
    logprob_T1 = (logit_T1.to(dtype) - norm_T1).float().clamp(max=0)
    at_target_TE = torch.zeros_like(rows.value_TE, dtype=torch.bool).scatter_(1, target_T1, True)
    others_T1 = (rounded.value_TE + rounded.weight_TE).masked_fill(at_target_TE, -torch.inf).logsumexp(-1, keepdim=True)
    moved_T1 = (logit_T1 + torch.expm1(-logprob_T1).log() - others_T1).clamp(min=NEVER)
    return rounded.with_values(torch.where(at_target_TE, logit_T1, (rounded.value_TE + moved_T1).clamp(min=NEVER)))
