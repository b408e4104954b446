"""The passes of the constrained log-prob on a CUDA device: the rows' sums in the forward, two products in the backward.

cuBLAS makes the matrices in parts that fit into MATRIX_BYTES: rows of the logits in the forward, stretches of the
vocabulary in the backward. The kernels of `triton_kernels` read or write them. `cuda` gives the reasons and the cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tailrl.kernels.row_sums import RowSums
from tailrl.kernels.sizes import GPU_KEPT_BYTES as KEPT_BYTES
from tailrl.kernels.sizes import GPU_MATRIX_BYTES as MATRIX_BYTES
from tailrl.kernels.triton_kernels import block_sums, keep_safe, safe_sums, spread_computed, spread_kept

BLOCK_TOKENS = 4096  # of a program; at most 2¹⁶, since an entry keeps a token's offset in two bytes
ENTRIES_STEP = 1024  # kept entries of a row and block that a program writes at once
KEPT_DENSITY = 0.25  # share of safe entries with room, within KEPT_BYTES
ALIGNED = 64  # columns: rows that do not start at a multiple of 16 bytes make a product several times slower
WARPS = 8


@dataclass(frozen=True, slots=True)
class KeptEntries:
    """The n safe entries that the backward needs, indexed by row and block of tokens."""

    entry_n: Tensor  # the token's offset in its block and exp(z − max z): int32 where products are bfloat16, else int64
    start_TB: Tensor  # int32, the first entry of a row and block
    count_TB: Tensor  # int32, safe tokens of a row in a block
    again_T: Tensor  # uint8, whether to compute a row again, since some of its entries are missing
    active_V: Tensor  # uint8, whether a token is safe in some row


@dataclass(frozen=True, slots=True)
class Pushes:
    """The factors of the gradient by the logits of T rows; float32 [T] except the first."""

    chosen_T: Tensor  # int64, the sampled token, −1 outside the set
    max_T: Tensor  # the largest logit
    cut_T: Tensor  # the smallest safe logit
    norm_T: Tensor  # log of a probability's denominator, where exp(z − max z) is the numerator
    scale_T: Tensor  # factor of a safe token's probability: −c, over the temperature
    chosen_gradient_T: Tensor  # the sampled token's own gradient: c (1 − p), over the temperature


@dataclass(frozen=True, slots=True)
class Stretch:
    """The U tokens, of S neighbours, safe in some row, as columns, padded with zeros to a multiple of ALIGNED."""

    first: int  # the first of the S tokens, also the first of a block
    count: int  # U
    column_S: Tensor  # int32, the columns of the U tokens
    weight_UH: Tensor  # the weight's row for each column; any row for a padding column


def product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """The matrix product [M, N], accumulated and returned in float32."""
    if left_MK.is_cuda and left_MK.dtype == torch.bfloat16:
        return torch.mm(left_MK, right_KN, out_dtype=torch.float32)
    return left_MK.float() @ right_KN.float()  # a CPU, under Triton's interpreter, has no such product


def _parts(count: int, row_bytes: int) -> Iterator[slice]:
    """Equal slices of `count` rows of a matrix, each within MATRIX_BYTES, but of at least ALIGNED rows."""
    height = -(-count // max(1, -(-count * row_bytes // MATRIX_BYTES)))
    height = max(ALIGNED, -(-height // ALIGNED) * ALIGNED)
    return (slice(first, min(first + height, count)) for first in range(0, count, height))


def _blocks(tokens: int) -> int:
    """Number of blocks of so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def row_sums(
    hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, log_rho_T: Tensor, temperature: float, keep: bool
) -> tuple[RowSums, KeptEntries]:
    """The rows' sums, and their safe sets for the backward, with entries where `keep`."""
    scale = (len(weight_VH), 1 / temperature)
    masked = bool((log_rho_T > -torch.inf).any())
    kept = _room(hidden_TH, len(weight_VH), masked, masked and keep)
    used_1 = tokens_T.new_zeros(1)
    max_T, chosen_T, all_T, safe_T, moment_T, cut_T = log_rho_T.new_empty(6, len(log_rho_T))
    for part in _parts(len(hidden_TH), 4 * len(weight_VH)):
        logits_CV = product(hidden_TH[part], weight_VH.T)
        # To the bit as the kernels form it: the token at the maximum must not lie below it.
        chosen_T[part] = logits_CV.gather(1, tokens_T[part, None]).squeeze(1) * scale[1]
        grid = (len(logits_CV), _blocks(len(weight_VH)))
        max_CB, all_CB, moment_CB = logits_CV.new_empty(3, *grid)
        block_sums[grid](logits_CV, max_CB, all_CB, moment_CB, *scale, BLOCK=BLOCK_TOKENS, num_warps=WARPS)
        max_C = max_CB.amax(1)
        cut_C = max_C + log_rho_T[part]
        # From each block's maximum to the row's.
        shift_CB = max_CB - max_C[:, None]
        ratio_CB = shift_CB.exp()
        safe_CB, moment_CB = ratio_CB * all_CB, ratio_CB * (moment_CB + shift_CB * all_CB)
        max_T[part], cut_T[part], all_T[part] = max_C, cut_C, safe_CB.sum(1)
        if masked:
            safe_CB, moment_CB = logits_CV.new_zeros(2, *grid)
            sums = (safe_CB, moment_CB, kept.count_TB[part])
            safe_sums[grid](logits_CV, max_CB, max_C, cut_C, *sums, *scale, BLOCK=BLOCK_TOKENS, num_warps=WARPS)
        if masked and keep:
            _keep(kept, part, used_1, logits_CV, max_C, cut_C, scale)
        safe_T[part], moment_T[part] = safe_CB.sum(1), moment_CB.sum(1)
        del logits_CV  # free it before the next part
    kept_vocab_T = kept.count_TB.sum(1) if masked else torch.full_like(tokens_T, len(weight_VH))
    return RowSums(max_T, cut_T, chosen_T, all_T, safe_T, moment_T, kept_vocab_T), _trimmed(kept, int(used_1))


def _room(hidden_TH: Tensor, vocabulary: int, masked: bool, keep: bool) -> KeptEntries:
    """Room for safe entries; none without a mask, where every row is computed again."""
    rows, zeros = len(hidden_TH), hidden_TH.new_zeros
    entry = torch.int32 if hidden_TH.dtype == torch.bfloat16 else torch.int64
    room = int(min(KEPT_DENSITY * rows * vocabulary, KEPT_BYTES // entry.itemsize)) if keep else 0
    blocks = _blocks(vocabulary) if masked else 0
    return KeptEntries(
        entry_n=hidden_TH.new_empty(room, dtype=entry),
        start_TB=zeros(rows, blocks, dtype=torch.int32),
        count_TB=zeros(rows, blocks, dtype=torch.int32),
        again_T=hidden_TH.new_full((rows,), not masked, dtype=torch.uint8),
        active_V=hidden_TH.new_full((vocabulary,), not masked, dtype=torch.uint8),
    )


def _keep(
    kept: KeptEntries,
    part: slice,
    used_1: Tensor,
    logits_CV: Tensor,
    max_C: Tensor,
    cut_C: Tensor,
    scale: tuple[int, float],
) -> None:
    """Append the safe entries of a part of the rows to the `used_1` that are there, as far as there is room."""
    end_CB = kept.count_TB[part].flatten().cumsum(0).view(len(max_C), -1) + used_1
    kept.start_TB[part] = (end_CB - kept.count_TB[part]).int()
    kept.again_T[part] = end_CB[:, -1] > len(kept.entry_n)
    used_1.copy_(end_CB[-1, -1:])
    keep_safe[len(max_C), end_CB.shape[1]](
        *(logits_CV, max_C, cut_C, kept.count_TB[part], kept.start_TB[part], kept.again_T[part]),
        *(kept.active_V, kept.entry_n, *scale),
        BLOCK=BLOCK_TOKENS,
        num_warps=WARPS,
    )


def _trimmed(kept: KeptEntries, used: int) -> KeptEntries:
    """The entries without unused room."""
    if used >= len(kept.entry_n):
        return kept
    return replace(kept, entry_n=kept.entry_n[:used].clone())


def gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    pushes: Pushes,
    kept: KeptEntries,
    temperature: float,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by the hidden states, float32, and by the weight, in its dtype; None where not wanted."""
    d_hidden = torch.zeros_like(hidden_TH, dtype=torch.float32) if wanted[0] else None
    d_weight = torch.zeros_like(weight_VH) if wanted[1] else None
    pushed_T, again_T = pushes.scale_T != 0, kept.again_T != 0
    kept_K, again_A = ((pushed_T & mask_T).nonzero().squeeze(1) for mask_T in (~again_T, again_T))
    rows_R = torch.cat([kept_K, again_A])
    if len(rows_R) == 0:
        return d_hidden, d_weight
    hidden_RH = hidden_TH[rows_R]
    d_hidden_RH = torch.zeros_like(hidden_RH, dtype=torch.float32)
    for tokens in _slices(len(weight_VH), len(rows_R) * weight_VH.element_size()):
        tokens_U = kept.active_V[tokens].nonzero().squeeze(1)
        if len(tokens_U) == 0:
            continue
        column_S = kept.active_V[tokens].cumsum(0, dtype=torch.int32) - 1
        weight_UH = weight_VH[tokens][pad(tokens_U, (0, -len(tokens_U) % ALIGNED))]
        stretch = Stretch(tokens.start, len(tokens_U), column_S, weight_UH)
        gradient_RU = weight_VH.new_empty(len(rows_R), len(weight_UH))
        gradient_RU[:, stretch.count :] = 0.0
        _spread_kept(gradient_RU[: len(kept_K)], kept_K, pushes, kept, stretch)
        _spread_computed(gradient_RU[len(kept_K) :], again_A, pushes, hidden_RH[len(kept_K) :], temperature, stretch)
        if d_hidden is not None:
            d_hidden_RH += product(gradient_RU, weight_UH)
        if d_weight is not None:
            d_weight[tokens][tokens_U] = product(gradient_RU.T, hidden_RH)[: stretch.count].to(d_weight.dtype)
    if d_hidden is not None:
        d_hidden[rows_R] = d_hidden_RH
    return d_hidden, d_weight


def _slices(vocabulary: int, token_bytes: int) -> Iterator[slice]:
    """Slices of the vocabulary: as many whole blocks as fit into MATRIX_BYTES, at least one."""
    width = max(1, MATRIX_BYTES // (token_bytes * BLOCK_TOKENS)) * BLOCK_TOKENS
    return (slice(first, min(first + width, vocabulary)) for first in range(0, vocabulary, width))


def _spread_kept(gradient_KU: Tensor, rows_K: Tensor, pushes: Pushes, kept: KeptEntries, stretch: Stretch) -> None:
    """Write the gradient by the logits in a stretch of the vocabulary, for rows with kept entries."""
    if len(rows_K) == 0:
        return
    column_S = stretch.column_S
    blocks = _blocks(len(column_S))
    ends_B = (torch.arange(1, blocks + 1, device=column_S.device) * BLOCK_TOKENS).clamp(max=len(column_S))
    spread_kept[len(rows_K), blocks](
        *(gradient_KU, rows_K, kept.count_TB, kept.start_TB, kept.entry_n),
        *(column_S, pad(column_S[ends_B - 1] + 1, (1, 0))),
        *(pushes.scale_T * (-pushes.norm_T).exp(), pushes.chosen_T, pushes.chosen_gradient_T),
        *(gradient_KU.shape[1], stretch.first // BLOCK_TOKENS, kept.count_TB.shape[1]),
        BLOCK=BLOCK_TOKENS,
        STEP=ENTRIES_STEP,
        num_warps=WARPS,
    )


def _spread_computed(
    gradient_AU: Tensor, rows_A: Tensor, pushes: Pushes, hidden_AH: Tensor, temperature: float, stretch: Stretch
) -> None:
    """`_spread_kept` for rows whose logits are computed again from their hidden states."""
    width = len(stretch.weight_UH)
    for part in _parts(len(rows_A), 4 * width):
        rows_C = rows_A[part]
        chosen_C = pushes.chosen_T[rows_C] - stretch.first
        there_C = (chosen_C >= 0) & (chosen_C < len(stretch.column_S))
        column_C = stretch.column_S[chosen_C.clamp(0, len(stretch.column_S) - 1)].masked_fill(~there_C, -1)
        spread_computed[len(rows_C), _blocks(width)](
            *(gradient_AU[part], product(hidden_AH[part], stretch.weight_UH.T), rows_C),
            *(pushes.cut_T, pushes.max_T + pushes.norm_T, pushes.scale_T, column_C, pushes.chosen_gradient_T),
            *(stretch.count, width, 1 / temperature),
            BLOCK=BLOCK_TOKENS,
            num_warps=WARPS,
        )
