"""Batch-invariant operators: a row's result depends on that row alone (VeXact, arXiv 2605.14220).

The exact engine samples with them and the trainer scores with them, so both compute the same bits. PyTorch's own
operators differ with the batch on a CPU. Three kinds do, and this is the remedy for each:

- A matrix product with weights chooses its kernel by the number of rows. Any multiple of `FEWEST_ROWS` gives the same
  bits on Intel and AMD (on AMD 4 would do). But AMX, and float32 with several threads of an Intel CPU, cut long sums by
  the number of rows. There `product` adds up shorter sums or takes `BLOCK_ROWS` at a time; `at_once` measures which.
- An elementwise exp, log or SiLU has a vectorised body and a scalar tail with other rounding. A multiple of `ROWS` rows
  leaves no tail at any width, with one thread or two; round widths need fewer rows (`row_multiple`). Rows are padded at
  their end and the padding is dropped afterwards.
- `scaled_dot_product_attention` cuts queries and keys into blocks by their number. Here keys are padded to a multiple
  of `KEYS` at their absolute positions. A key beyond the query's position gets probability 0. Products with the values
  are added block after block, so later blocks add zeros and the padding's length does not matter. One softmax over all
  keys is already row-wise: trailing zeros stay zeros in each of its lanes.

On a GPU products take rows of one number (`GPU_ROWS`), and so do logits, since a sum over a large vocabulary is cut by
the number of rows. Attention is a kernel of its own (`attention_rows`). An H200 and an H100 were exact.

The backward is autograd's: correct, not batch-invariant, and it need not be. On a CPU it keeps every layer's attention
probabilities, on a GPU it computes one layer's anew: memory grows with the square of the length.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tailrl.kernels.packing import Packing, padded, unpadded

ROWS = 64
FEWEST_ROWS = 16
BLOCK_ROWS = 32  # rows that every kernel seen so far multiplies alike; with more, AMX cuts long sums differently
GPU_ROWS = 128  # rows of a product, and of logits, on a GPU: as many as sequences in flight
SUMMANDS = 512  # of a float32 sum that no kernel seen so far cuts; an Intel CPU with two threads cuts from 768 on
MOST_ROWS = 1024  # most rows of a product at once, as many as `at_once` tries
VECTORS = 128  # half-precision numbers in one unrolled vector loop, times two threads
KEYS = 32  # AMX tile width in half precision; a remainder is accumulated in another order
VALUES = 128  # values in one product, a multiple of `KEYS`; an AMD CPU cuts float32 sums of more than 192
QUERIES = 4  # divides the rows of a product in attention; a decoding step has one for each head that shares a key
CHUNK_LOGITS = 2**22  # logits held at once while rows are scored without a gradient

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""A layer's attention over one row: layer, query [P, H, d], key and value [P, K, d], scale → [P, H, d]."""


def logit_chunks(rows: int, vocabulary: int, on_gpu: bool = False) -> Iterator[slice]:
    """Slices of rows whose logits are held at once, and padded by `pad_rows`."""
    size = GPU_ROWS if on_gpu else max(1, CHUNK_LOGITS // (vocabulary * ROWS)) * ROWS
    for start in range(0, rows, size):
        yield slice(start, start + size)


def rounded_up(count: int, multiple: int) -> int:
    """The smallest multiple not below the count."""
    return -(-count // multiple) * multiple


def row_multiple(widths: Iterable[int]) -> int:
    """At any multiple of it, rows of these widths get the same bits however many they are."""
    return min(ROWS, max(FEWEST_ROWS, VECTORS // gcd(VECTORS, *widths)))


def pad_rows(rows_R: Tensor) -> Tensor:
    """Zeros after the last entry of the first dimension, up to a multiple of `ROWS`, on a GPU of `GPU_ROWS`."""
    missing = -len(rows_R) % (GPU_ROWS if rows_R.is_cuda else ROWS)
    return pad(rows_R, (0, 0) * (rows_R.ndim - 1) + (0, missing)) if missing else rows_R


@cache
def at_once(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> tuple[int, int]:  # noqa: ARG001 - a key
    """Rows, and summands of each sum, that a product takes at once on this CPU so that no row affects another.

    All of both, else shorter sums, else fewer rows. It is tried on sums that cancel, whose rounding half precision
    shows; `rollout.self_test` then tries the whole engine. It may depend on the threads, and the bits depend on it.

    Args:
        outputs: numbers in a row of the result.
        inputs: numbers in a row.
        dtype: of both.
        threads: PyTorch's threads at present.
    """
    # No more rows than an engine has in flight, with a large vocabulary: more logits would need a policy's memory.
    most = min(MOST_ROWS, max(2 * ROWS, next(logit_chunks(MOST_ROWS, outputs)).stop))
    # Not in half precision, which would round each of several sums.
    shorter = [SUMMANDS] if dtype == torch.float32 and inputs > SUMMANDS else []
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(n, (inputs + 1) // 2, generator=generator) for n in (most, outputs)]
    order_I = torch.randperm(2 * halves[0].shape[1], generator=generator)[:inputs]
    rows_RI, weight_OI = (
        torch.cat([half, sign * half], 1)[:, order_I].to(dtype) for half, sign in zip(halves, (1, -1), strict=True)
    )
    counts = sorted({most, *range(FEWEST_ROWS, min(most, 2 * ROWS), FEWEST_ROWS), *range(2 * ROWS, most, 2 * ROWS)})
    with torch.no_grad():
        for summands in (inputs, *shorter):
            expected_RO = _product(rows_RI, weight_OI, None, BLOCK_ROWS, summands)
            if all(
                torch.equal(_product(rows_RI[:count], weight_OI, None, most, summands), expected_RO[:count])
                for count in counts
            ):
                return most, summands
    return BLOCK_ROWS, inputs


def product(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Batch-invariant `linear`: [R, O]. On a GPU every product has `GPU_ROWS` rows, so that cuBLAS takes one kernel.

    Args:
        rows_RI: floating [R, I], R a multiple of `FEWEST_ROWS`. A leading dimension of 1 would choose other kernels.
        weight_OI: [O, I].
        bias_O: [O].
    """
    if rows_RI.is_cuda:
        parts = torch.split(pad(rows_RI, (0, 0, 0, -len(rows_RI) % GPU_ROWS)), GPU_ROWS)
        return torch.cat([linear(part, weight_OI, bias_O) for part in parts])[: len(rows_RI)]
    return _product(rows_RI, weight_OI, bias_O, *at_once(*weight_OI.shape, weight_OI.dtype, torch.get_num_threads()))


def _product(rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rows: int, summands: int) -> Tensor:
    """`linear` in parts of `rows` rows and `summands` summands."""
    if len(rows_RI) > rows:
        return torch.cat([_product(part, weight_OI, bias_O, rows, summands) for part in torch.split(rows_RI, rows)])
    if rows_RI.shape[1] <= summands:
        return linear(rows_RI, weight_OI, bias_O)
    parts = zip(torch.split(rows_RI, summands, 1), torch.split(weight_OI, summands, 1), strict=True)
    out_RO = linear(*next(parts), bias_O)
    for rows_RS, weight_OS in parts:
        out_RO = torch.addmm(out_RO, rows_RS, weight_OS.t())
    return out_RO


def future_bias(position_NL: Tensor, group: int, keys: int) -> Tensor:
    """The causal mask added to scores: −inf for keys beyond a query's position, else 0; float32 [N, 1, R, keys].

    Args:
        position_NL: int64, each query's position in its sequence, prompt included.
        group: G, query heads that share a key; R = L × G.
        keys: M, a multiple of `KEYS`.
    """
    position_NR = position_NL.repeat_interleave(group, 1)
    future_N1RM = torch.arange(keys, device=position_NL.device) > position_NR[:, None, :, None]
    return torch.zeros(future_N1RM.shape, device=position_NL.device).masked_fill_(future_N1RM, -torch.inf)


def causal_attention(
    query_NLHD: Tensor, key_NKDM: Tensor, value_NKMD: Tensor, bias_N1RM: Tensor, scaling: float
) -> Tensor:
    """Attention of L queries over M keys for each of N sequences, [N, L, H, D], in the dtype of the queries.

    Args:
        query_NLHD: H query heads of size D.
        key_NKDM: K key heads, each shared by H / K query heads; M is a multiple of `KEYS`. Every entry is finite.
        value_NKMD: likewise. Keys and values are contiguous in their last dimension: strides choose kernels too.
        bias_N1RM: `future_bias` of these queries.
        scaling: multiplies the queries.
    """
    batch, length, heads, size = query_NLHD.shape
    key_heads, keys = value_NKMD.shape[1:3]
    group = heads // key_heads
    rows_NKRD = query_NLHD.view(batch, length, key_heads, group, size).transpose(1, 2).flatten(2, 3)
    if query_NLHD.is_cuda:
        from tailrl.kernels.attention_rows import attention_rows

        out_NKRD = attention_rows(rows_NKRD, key_NKDM, value_NKMD, bias_N1RM, scaling)
        return out_NKRD.view(batch, key_heads, length, group, size).transpose(1, 2).flatten(2, 3)
    rows_NKRD = rows_NKRD * scaling
    rows = length * group
    missing = -rows % QUERIES
    score_BRM = torch.bmm(_pad_queries(rows_NKRD.flatten(0, 1), missing), key_NKDM.flatten(0, 1))[:, :rows]
    score_NKRM = score_BRM.view(batch, key_heads, rows, keys) + bias_N1RM
    probs_BRM = _pad_queries(score_NKRM.softmax(-1).to(query_NLHD.dtype).flatten(0, 1), missing)
    value_BMD = value_NKMD.flatten(0, 1)
    out_BRD = torch.bmm(probs_BRM[..., :VALUES], value_BMD[:, :VALUES])
    for start in range(VALUES, keys, VALUES):
        block = slice(start, start + VALUES)
        out_BRD = out_BRD + torch.bmm(probs_BRM[..., block], value_BMD[:, block])
    out_NKLGD = out_BRD[:, :rows].view(batch, key_heads, length, group, size)
    return out_NKLGD.transpose(1, 2).flatten(2, 3)


@torch.no_grad()
def uneven_lengths(heads: int, key_heads: int, size: int, like: Tensor, longest: int) -> list[int]:
    """Numbers of keys, up to `longest`, over which a query's attention has other bits than beside later keys.

    None where `causal_attention` is batch-invariant here. It is tried on random numbers, with the dtype and the device
    of `like`. For each multiple of `KEYS` the last query is computed alone, and beside the last queries of the others.
    """
    length = rounded_up(longest, KEYS)
    generator = torch.Generator().manual_seed(0)
    last_L = torch.arange(KEYS - 1, length, KEYS, device=like.device)
    query_1LHD, key_1KDM, value_1KMD = (
        torch.randn(1, *shape, generator=generator).to(like)
        for shape in ((len(last_L), heads, size), (key_heads, size, length), (key_heads, length, size))
    )

    def attention(turns: slice, keys: int) -> Tensor:
        bias_11RM = future_bias(last_L[None, turns], heads // key_heads, keys)
        held = key_1KDM[..., :keys], value_1KMD[:, :, :keys]
        return causal_attention(query_1LHD[:, turns], *held, bias_11RM, size**-0.5)[0]

    # Sixty-four at once, as all scores of a long sequence would need a policy's memory.
    turns = [slice(start, start + 64) for start in range(0, len(last_L), 64)]
    together_LHD = torch.cat([attention(some, length) for some in turns])
    alone = [(keys, attention(slice(turn, turn + 1), keys)[0]) for turn, keys in enumerate((last_L + 1).tolist())]
    return [keys for (keys, own_HD), among_HD in zip(alone, together_LHD, strict=True) if not own_HD.equal(among_HD)]


def _pad_queries(rows_BRX: Tensor, missing: int) -> Tensor:
    return pad(rows_BRX, (0, 0, 0, missing)) if missing else rows_BRX


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Causal attention within each sequence of a packed row, whose end may be padding."""

    packing: Packing  # the sequences; their padded view is L long, a multiple of `KEYS`
    bias_11RM: Tensor  # `future_bias`, one for all sequences

    @classmethod
    def of(cls, packing: Packing, group: int) -> "PackedAttention":
        """The attention of a packed row where `group` query heads share a key."""
        longest = packing.index_NL.shape[1]
        length = rounded_up(longest, KEYS)
        widened = replace(
            packing,
            index_NL=pad(packing.index_NL, (0, length - longest)),
            token_P=packing.token_P // longest * length + packing.token_P % longest,
        )
        return cls(widened, future_bias(torch.arange(length, device=packing.token_P.device)[None], group, length))

    def view(self, row_PHD: Tensor) -> Tensor:
        """The padded view [N, L, H, D] of a row."""
        tokens = len(self.packing.token_P)
        return padded(row_PHD[:tokens].flatten(1), self.packing).view(*self.packing.index_NL.shape, *row_PHD.shape[1:])

    def keys(self, key_PKD: Tensor) -> Tensor:
        """Keys for `causal_attention`: [N, K, D, L]."""
        return self.view(key_PKD).permute(0, 2, 3, 1).contiguous()

    def values(self, value_PKD: Tensor) -> Tensor:
        """Values for `causal_attention`: [N, K, L, D]."""
        return self.view(value_PKD).transpose(1, 2).contiguous()

    def attend(self, _: int, query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor, scaling: float) -> Tensor:
        """See `Attend`."""
        keys, values = self.keys(key_PKD), self.values(value_PKD)
        out_NLHD = causal_attention(self.view(query_PHD), keys, values, self.bias_11RM, scaling)
        out_PD = unpadded(out_NLHD.flatten(2), self.packing)
        return pad(out_PD, (0, 0, 0, len(query_PHD) - len(out_PD))).view(query_PHD.shape)
