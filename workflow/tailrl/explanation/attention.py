"""Attention under a hypothesis: causal over one sequence, with a window, other positions, or a rounded cache."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tailrl.model.forward import CACHE_ROUNDING

ALONE = "explained"
NO_WINDOW = 0  # a width of 0: attention looks back over everything, whatever the model says


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of transformers' interface; the window replaces it
    *,
    scaling: float | None = None,
    window: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Causal attention of one sequence: [1, heads, P, d] → [1, P, heads, d]."""
    rounding = getattr(module, CACHE_ROUNDING, None)
    if rounding is not None:
        key, value = rounding(key), rounding(value)
    back = None if window == NO_WINDOW else min((w for w in (window, sliding_window) if w is not None), default=None)
    if softcap is not None:
        return _capped(query, key, value, scaling, back, softcap), None
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if back is None or back >= length:
        out = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    else:
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            attn_mask=_seen(length, back, query.device),
            scale=scaling,
            enable_gqa=grouped,
        )
    return out.transpose(1, 2), None


def _seen(length: int, back: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees, bool [P, P]."""
    place_P = torch.arange(length, device=device)
    distance_PP = place_P[:, None] - place_P
    return (distance_PP >= 0) & (distance_PP < (back or length))


def _capped(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, back: int | None, softcap: float
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    score = query @ keys.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~_seen(query.shape[2], back, query.device), -torch.inf)
    return (score.float().softmax(-1).to(values.dtype) @ values).transpose(1, 2)


AttentionInterface.register(ALONE, _attention)
