"""Attention over a packed row without padding, on a GPU: PyTorch's `varlen_attn`, which is FlashAttention.

A row has segments: each prefix with its own keys, and each sequence's own tokens with the keys of its prefix and its
own. The queries are the row itself. Keys and values are repeated for the sequences that share a prefix. The kernel
aligns its causal mask at the last key of a segment (`torch.nn.attention.bias` says so of a lower-right mask), so that a
token sees its whole prefix and no later token.

On ragged lengths a padded view costs about twice the products, and cuDNN plans each of its shapes anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
OLDEST_GPU = (8, 0)  # compute capability: Ampere


def serves(query: Tensor) -> bool:
    """Whether the kernel takes queries [..., d] of this device, dtype and size."""
    return (
        query.is_cuda
        and query.dtype in DTYPES
        and query.shape[-1] <= LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= OLDEST_GPU
    )


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a packed row of P tokens; J are its keys, repeated for the segments that share them."""

    query_ends: Tensor  # int32, 0 and the end of each segment's queries in the row
    key_ends: Tensor  # int32, likewise among the J keys
    longest_query: int
    longest_key: int
    token_J: Tensor | None  # index in the row of each key; None: the row itself
    key_P: Tensor  # index among the keys of each token's own key
    # Indices in the row of R tokens that have C keys each, and the indices of these keys, [R, C].
    repeated: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(
        cls, lengths: Sequence[int], prefixes: Sequence[int], owners: Sequence[int], device: torch.device
    ) -> "Segments":
        """The segments of `packing.pack`'s row, from its arguments."""
        starts = np.cumsum([0, *prefixes, *lengths])
        runs = [np.arange(start, end) for start, end in pairwise(starts)]
        prefix_runs, own_runs = runs[: len(prefixes)], runs[len(prefixes) :]
        before = [prefix_runs[owner] for owner in owners]
        keys = [*prefix_runs, *(np.concatenate(pair) for pair in zip(before, own_runs, strict=True))]
        # The kernel is not asked for a segment without a query.
        whole = [number for number, run in enumerate(runs) if len(run)]
        key_ends = np.cumsum([0, *(len(keys[number]) for number in whole)])
        first = dict(zip(whole, key_ends[:-1].tolist(), strict=True))
        key_P = np.concatenate([first[n] + np.arange(len(keys[n]) - len(runs[n]), len(keys[n])) for n in whole])
        copies: dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
        for prefix, run in enumerate(prefix_runs):
            sharing = [n + len(prefixes) for n, owner in enumerate(owners) if owner == prefix and lengths[n]]
            if len(run) and sharing:
                at = np.array([first[number] for number in (prefix, *sharing)])
                copies.setdefault(len(at), []).append((run, np.arange(len(run))[:, None] + at))

        def tensor(values: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            query_ends=tensor(np.cumsum([0, *(len(runs[number]) for number in whole)])).int(),
            key_ends=tensor(key_ends).int(),
            longest_query=max(len(runs[number]) for number in whole),
            longest_key=max(len(keys[number]) for number in whole),
            token_J=tensor(np.concatenate([keys[number] for number in whole])) if copies else None,
            key_P=tensor(key_P),
            repeated=tuple(
                (tensor(np.concatenate([run for run, _ in same])), tensor(np.concatenate([at for _, at in same])))
                for same in copies.values()
            ),
        )


@cache
def _knows_groups(kernel: Callable[..., Any]) -> bool:
    """Whether the kernel takes fewer key heads than query heads; that of PyTorch 2.11 does not."""
    return "enable_gqa" in signature(kernel).parameters


def varlen_attention(
    query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor, segments: Segments, scaling: float
) -> Tensor:
    """Causal attention within each sequence of a packed row: [P, H, D] in the dtype of the queries.

    Args:
        query_PHD: H query heads of size D, which `serves` accepts.
        key_PKD: K key heads, each shared by H / K query heads.
        value_PKD: likewise.
        segments: of the row.
        scaling: multiplies the scores.
    """
    from torch.nn.attention import varlen

    grouped: dict[str, Any] = {}
    if query_PHD.shape[1] != key_PKD.shape[1]:
        if _knows_groups(varlen.varlen_attn):
            grouped = {"enable_gqa": True}
        else:
            group = query_PHD.shape[1] // key_PKD.shape[1]
            key_PKD, value_PKD = (tensor.repeat_interleave(group, 1) for tensor in (key_PKD, value_PKD))
    size = query_PHD.shape[-1]
    if missing := -size % HEAD_MULTIPLE:
        query_PHD, key_PKD, value_PKD = (pad(tensor, (0, missing)) for tensor in (query_PHD, key_PKD, value_PKD))
    if segments.token_J is not None:
        key_PKD, value_PKD = (
            cast(Tensor, _Repeated.apply(tensor, segments))  # type: ignore[no-untyped-call]
            for tensor in (key_PKD, value_PKD)
        )
    out_PHD = varlen.varlen_attn(
        query_PHD,
        key_PKD,
        value_PKD,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scale=scaling,
        window_size=(-1, 0),
        **grouped,
    )
    return cast(Tensor, out_PHD)[..., :size]


class _Repeated(torch.autograd.Function):
    """Keys in the order of the segments; the gradients of one token's keys are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, row_PKD: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return row_PKD.index_select(0, cast(Tensor, segments.token_J))

    @staticmethod
    def backward(ctx: Any, gradient_JKD: Tensor) -> tuple[Tensor, None]:
        gradient_PKD = gradient_JKD.index_select(0, ctx.segments.key_P)
        for token_R, key_RC in ctx.segments.repeated:
            gradient_PKD[token_R] = gradient_JKD[key_RC].sum(1)
        return gradient_PKD, None
