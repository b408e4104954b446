"""Batch-invariant attention on a GPU: a query's result depends on its own keys alone, by the order of the sums.

A program has `QUERY_ROWS` queries of one key head and takes keys in blocks of `KEY_BLOCK`, first to last, with the
running softmax of FlashAttention (arXiv 2205.14135, Algorithm 1). Each block is one product of one shape, whatever the
number of queries, keys and sequences. A block of later keys has probability 0: it changes neither maximum nor sum nor
result. cuBLAS instead chooses its kernel by these three numbers.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tailrl.kernels.triton_kernels import attend

QUERY_ROWS = 16  # of a program
KEY_BLOCK = 32  # of a block; divides every number of keys (`batch_invariant.KEYS`)
NARROWEST = 16  # of a product's inner dimension
ATTENTION_WARPS, ATTENTION_STAGES = 4, 2


def attention_rows(
    query_NKRD: Tensor, key_NKDM: Tensor, value_NKMD: Tensor, bias_N1RM: Tensor, scaling: float
) -> Tensor:
    """Attention [N, K, R, D] of R queries for each of K key heads, in the dtype of the queries.

    The backward is the definition's, in float32, and not batch-invariant: it holds all scores of a layer at a time.

    Args:
        query_NKRD: float32, bfloat16 or float16.
        key_NKDM: M keys, a multiple of `KEY_BLOCK`, contiguous in their last dimension.
        value_NKMD: likewise.
        bias_N1RM: float32, added to the scores, finite for some of the first `KEY_BLOCK` keys; N may be 1 for all
            sequences.
        scaling: multiplies the scores.

    Raises:
        ValueError: keys or values of another layout.
    """
    if key_NKDM.shape[-1] % KEY_BLOCK or key_NKDM.stride(-1) != 1 or value_NKMD.stride(-1) != 1:
        raise ValueError(f"keys and values are contiguous in their last dimension, a multiple of {KEY_BLOCK} keys")
    arguments = (query_NKRD.contiguous(), key_NKDM, value_NKMD, bias_N1RM.contiguous(), scaling)
    return cast(Tensor, _AttentionRows.apply(*arguments))  # type: ignore[no-untyped-call]


class _AttentionRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_NKRD: Tensor, key_NKDM: Tensor, value_NKMD: Tensor, bias_N1RM: Tensor, scaling: float
    ) -> Tensor:
        sequences, heads, rows, size = query_NKRD.shape
        out_NKRD = torch.empty_like(query_NKRD)
        attend[sequences * heads, -(-rows // QUERY_ROWS)](
            query_NKRD,
            key_NKDM,
            value_NKMD,
            bias_N1RM,
            out_NKRD,
            rows,
            key_NKDM.shape[-1],
            bias_N1RM.stride(0) if len(bias_N1RM) > 1 else 0,
            *key_NKDM.stride()[:3],
            *value_NKMD.stride()[:3],
            scaling,
            HEADS=heads,
            SIZE=size,
            WIDTH=max(NARROWEST, 1 << (size - 1).bit_length()),
            QUERIES=QUERY_ROWS,
            KEYS=KEY_BLOCK,
            num_warps=ATTENTION_WARPS,
            num_stages=ATTENTION_STAGES,
        )
        ctx.scaling = scaling
        ctx.save_for_backward(query_NKRD, key_NKDM, value_NKMD, bias_N1RM)
        return out_NKRD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NKRD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias = (tensor.float() for tensor in ctx.saved_tensors)
        gradient = gradient_NKRD.float()
        probability = (ctx.scaling * query @ key + bias).softmax(-1)
        by_probability = gradient @ value.mT
        mean = (by_probability * probability).sum(-1, keepdim=True)
        by_score = ctx.scaling * probability * (by_probability - mean)
        found = (by_score @ key.mT, query.mT @ by_score, probability.mT @ gradient)
        return *(part.to(given) for part, given in zip(found, ctx.saved_tensors, strict=False)), None, None
