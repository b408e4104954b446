"""The passes of the constrained log-prob on a CUDA device: the rows' sums in the forward, two products in the backward.

The matrices are made by cuBLAS in parts that fit into MATRIX_BYTES, rows of the logits in the forward and stretches of
the vocabulary in the backward, and read or written by the kernels of `logprobs_kernels`. Why it is done so, and what it
is expected to cost, is said in `logprobs_triton`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tailrl.kernels.row_sums import RowSums
from tailrl.kernels.triton_kernels import block_sums, keep_safe, safe_sums, spread_computed, spread_kept

BLOCK_TOKENS = 4096  # of a program; at most 2¹⁶, for an offset within them is kept in two bytes
ENTRIES_STEP = 1024  # kept entries of a row and block that a program writes out in one go
MATRIX_BYTES = 2**30  # of logits in the forward, of their gradient in the backward: the largest thing held at a time
KEPT_BYTES = 2**30  # of all entries kept by one call; rows beyond it are computed again
KEPT_DENSITY = 0.25  # share of safe entries for which room is made, within KEPT_BYTES
ALIGNED = 64  # columns: a row of logits that starts off a multiple of 16 bytes makes a product several times slower
WARPS = 8


@dataclass(frozen=True, slots=True)
class Kept:
    """The n safe entries that the backward needs, and where they are: by row and block of tokens.

    Attributes:
        entry_n: the token within its block and exp(z − max z): int32 where products are bfloat16, else int64.
        start_TB: int32, where the entries of a row and block begin.
        count_TB: int32, how many safe tokens a row has in a block.
        again_T: uint8, whether a row is to be computed again: some of its entries are not here.
        active_V: uint8, whether a token is safe in some row.
    """

    entry_n: Tensor
    start_TB: Tensor
    count_TB: Tensor
    again_T: Tensor
    active_V: Tensor


@dataclass(frozen=True, slots=True)
class Pushes:
    """What makes the gradient by the logits of T rows; float32 [T] but for the first.

    Attributes:
        chosen_T: int64, the sampled token, −1 where it is outside the set.
        max_T: the largest logit.
        cut_T: the smallest safe logit.
        norm_T: log of what exp(z − max z) is divided by in a probability.
        scale_T: what the probability of a safe token is multiplied with: −c, over the temperature.
        chosen_gradient_T: the sampled token's own gradient: c (1 − p), over the temperature.
    """

    chosen_T: Tensor
    max_T: Tensor
    cut_T: Tensor
    norm_T: Tensor
    scale_T: Tensor
    chosen_gradient_T: Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """The U tokens of S neighbouring ones that are safe in some row, and columns of zeros up to a multiple of ALIGNED.

    Attributes:
        first: the first of the S tokens, at which a block begins.
        count: U.
        place_S: int32, the column of a token that is among the U.
        weight_UH: the weight's rows of the columns; any row for one of zeros.
    """

    first: int
    count: int
    place_S: Tensor
    weight_UH: Tensor


def product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """The matrix product [M, N], added up and returned in float32."""
    if left_MK.is_cuda and left_MK.dtype == torch.bfloat16:
        return torch.mm(left_MK, right_KN, out_dtype=torch.float32)
    return left_MK.float() @ right_KN.float()  # a CPU, under Triton's interpreter, has no product of that kind


def _parts(count: int, row_bytes: int) -> Iterator[slice]:
    """Slices of `count` rows of a matrix, alike, each within MATRIX_BYTES; but never fewer rows than ALIGNED."""
    height = -(-count // max(1, -(-count * row_bytes // MATRIX_BYTES)))
    height = max(ALIGNED, -(-height // ALIGNED) * ALIGNED)
    return (slice(first, min(first + height, count)) for first in range(0, count, height))


def _blocks(tokens: int) -> int:
    """How many blocks so many tokens make."""
    return -(-tokens // BLOCK_TOKENS)


# --- forward ---------------------------------------------------------------------------------------------


def row_sums(
    hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, log_rho_T: Tensor, temperature: float, keep: bool
) -> tuple[RowSums, Kept]:
    """The rows' sums, and what the backward needs of their safe sets; no entries unless `keep`."""
    scale = (len(weight_VH), 1 / temperature)
    masked = bool((log_rho_T > -torch.inf).any())
    kept = _room(hidden_TH, len(weight_VH), masked, masked and keep)
    used_1 = tokens_T.new_zeros(1)
    max_T, chosen_T, all_T, safe_T, moment_T, cut_T = log_rho_T.new_empty(6, len(log_rho_T))
    for part in _parts(len(hidden_TH), 4 * len(weight_VH)):
        logits_CV = product(hidden_TH[part], weight_VH.T)
        # As the kernels form it, to the bit: the token at the maximum must not lie under it.
        chosen_T[part] = logits_CV.gather(1, tokens_T[part, None]).squeeze(1) * scale[1]
        grid = (len(logits_CV), _blocks(len(weight_VH)))
        max_CB, all_CB, moment_CB = logits_CV.new_empty(3, *grid)
        block_sums[grid](logits_CV, max_CB, all_CB, moment_CB, *scale, BLOCK=BLOCK_TOKENS, num_warps=WARPS)
        max_C = max_CB.amax(1)
        cut_C = max_C + log_rho_T[part]
        # From the blocks' maxima to that of the row.
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
        del logits_CV  # before the next is made
    kept_T = kept.count_TB.sum(1) if masked else torch.full_like(tokens_T, len(weight_VH))
    return RowSums(max_T, cut_T, chosen_T, all_T, safe_T, moment_T, kept_T), _trimmed(kept, int(used_1))


def _room(hidden_TH: Tensor, vocabulary: int, masked: bool, keep: bool) -> Kept:
    """Room for safe entries; without a mask every token is safe and every row is computed again."""
    rows, zeros = len(hidden_TH), hidden_TH.new_zeros
    entry = torch.int32 if hidden_TH.dtype == torch.bfloat16 else torch.int64
    room = int(min(KEPT_DENSITY * rows * vocabulary, KEPT_BYTES // entry.itemsize)) if keep else 0
    blocks = _blocks(vocabulary) if masked else 0
    return Kept(
        entry_n=hidden_TH.new_empty(room, dtype=entry),
        start_TB=zeros(rows, blocks, dtype=torch.int32),
        count_TB=zeros(rows, blocks, dtype=torch.int32),
        again_T=hidden_TH.new_full((rows,), not masked, dtype=torch.uint8),
        active_V=hidden_TH.new_full((vocabulary,), not masked, dtype=torch.uint8),
    )


def _keep(
    kept: Kept, part: slice, used_1: Tensor, logits_CV: Tensor, max_C: Tensor, cut_C: Tensor, scale: tuple[int, float]
) -> None:
    """Keep the safe entries of a part of the rows, as far as there is room, after the `used_1` that are there."""
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


def _trimmed(kept: Kept, used: int) -> Kept:
    """Without the room that was not needed."""
    if used >= len(kept.entry_n):
        return kept
    return replace(kept, entry_n=kept.entry_n[:used].clone())


# --- backward --------------------------------------------------------------------------------------------


def gradients(
    hidden_TH: Tensor, weight_VH: Tensor, pushes: Pushes, kept: Kept, temperature: float, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """By the hidden states, float32, and by the weight, in its dtype; each where it is wanted."""
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
        place_S = kept.active_V[tokens].cumsum(0, dtype=torch.int32) - 1
        weight_UH = weight_VH[tokens][pad(tokens_U, (0, -len(tokens_U) % ALIGNED))]
        stretch = Stretch(tokens.start, len(tokens_U), place_S, weight_UH)
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
    """Of the vocabulary: as many whole blocks as fit into MATRIX_BYTES, one at least."""
    width = max(1, MATRIX_BYTES // (token_bytes * BLOCK_TOKENS)) * BLOCK_TOKENS
    return (slice(first, min(first + width, vocabulary)) for first in range(0, vocabulary, width))


def _spread_kept(gradient_KU: Tensor, rows_K: Tensor, pushes: Pushes, kept: Kept, stretch: Stretch) -> None:
    """Write the gradient by the logits, in a stretch of the vocabulary, of rows whose entries were kept."""
    if len(rows_K) == 0:
        return
    place_S = stretch.place_S
    blocks = _blocks(len(place_S))
    ends_B = (torch.arange(1, blocks + 1, device=place_S.device) * BLOCK_TOKENS).clamp(max=len(place_S))
    spread_kept[len(rows_K), blocks](
        *(gradient_KU, rows_K, kept.count_TB, kept.start_TB, kept.entry_n),
        *(place_S, pad(place_S[ends_B - 1] + 1, (1, 0))),
        *(pushes.scale_T * (-pushes.norm_T).exp(), pushes.chosen_T, pushes.chosen_gradient_T),
        *(gradient_KU.shape[1], stretch.first // BLOCK_TOKENS, kept.count_TB.shape[1]),
        BLOCK=BLOCK_TOKENS,
        STEP=ENTRIES_STEP,
        num_warps=WARPS,
    )


def _spread_computed(
    gradient_AU: Tensor, rows_A: Tensor, pushes: Pushes, hidden_AH: Tensor, temperature: float, stretch: Stretch
) -> None:
    """The same of rows whose logits are computed again, from their hidden states."""
    width = len(stretch.weight_UH)
    for part in _parts(len(rows_A), 4 * width):
        rows_C = rows_A[part]
        chosen_C = pushes.chosen_T[rows_C] - stretch.first
        there_C = (chosen_C >= 0) & (chosen_C < len(stretch.place_S))
        place_C = stretch.place_S[chosen_C.clamp(0, len(stretch.place_S) - 1)].masked_fill(~there_C, -1)
        spread_computed[len(rows_C), _blocks(width)](
            *(gradient_AU[part], product(hidden_AH[part], stretch.weight_UH.T), rows_C),
            *(pushes.cut_T, pushes.max_T + pushes.norm_T, pushes.scale_T, place_C, pushes.chosen_gradient_T),
            *(stretch.count, width, 1 / temperature),
            BLOCK=BLOCK_TOKENS,
            num_warps=WARPS,
        )
