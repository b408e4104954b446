"""One chunk of rows of the constrained log-prob on a CPU: its sums in the forward, two products in the backward.

Logits have the vocabulary first, [V, C], so safe entries come out sorted by token. The weight's gradient is then one
weighted sum per token of the chunk's hidden states, which stay in cache. For the hidden states' gradient the entries
are sorted by block of tokens, then by row, so the block's rows of the weight stay in cache. Both sums are
`embedding_bag`, torch's fast operation for this on a CPU. Calls are few and large: each synchronises the threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tailrl.kernels.row_sums import RowSums
from tailrl.kernels.sizes import CHUNK_BYTES, CHUNK_ROWS
from tailrl.objective.safe_set import logit_cut

KEPT_DENSITY = 0.4  # share of safe entries up to which keeping them is cheaper than computing again
BLOCK_TOKENS = 4096  # tokens at a time, for numbers per token or per entry
CACHED_TOKENS = 2048  # tokens whose rows of the weight stay in cache


@dataclass(frozen=True, slots=True)
class Operands:
    """The factors of the logits."""

    hidden_TH: Tensor  # floating, last hidden states as given
    weight_VH: Tensor  # the head's weight in the dtype of the logits
    temperature: float  # the logits are divided by it

    def scaled(self, rows: slice | Tensor) -> Tensor:
        """A copy of some rows' hidden states over the temperature, in the dtype of the logits."""
        hidden_CH = self.hidden_TH[rows].to(self.weight_VH.dtype)
        return hidden_CH if self.temperature == 1.0 else hidden_CH / self.temperature


@dataclass(frozen=True, slots=True)
class Entries:
    """The n safe entries of a chunk, sorted by token, then row."""

    row_n: Tensor  # uint8, the row within the chunk
    exp_n: Tensor  # exp(z − max z)
    count_V: Tensor  # int32, entries of each token


class KeptEntries:
    """The entries of the chunks that fit, in memory preallocated once, to avoid heap fragmentation.

    `row_m`, `exp_m` and `count_SV` are as in Entries, of all chunks; unwritten parts take no physical memory.
    """

    def __init__(self, rows: int, weight_VH: Tensor, most_bytes: int) -> None:
        """Preallocate for the rows of all chunks, within so many bytes."""
        vocabulary, width = len(weight_VH), chunk_width(rows, weight_VH)
        most = min(int(rows * vocabulary * max(KEPT_DENSITY, 0.0)), most_bytes // (1 + weight_VH.element_size()))
        self.row_m = weight_VH.new_empty(most, dtype=torch.uint8)
        self.exp_m = weight_VH.new_empty(most)
        chunk_count = max(1, -(-rows // width)) if most_bytes else 0
        self.count_SV = weight_VH.new_empty(chunk_count, vocabulary, dtype=torch.int32)
        self.room = most_bytes
        self.ends = [0]  # entries up to the end of each kept chunk

    def add(self, entries: Entries) -> bool:
        """Keep a chunk's entries; False where they do not fit."""
        start, size = self.ends[-1], len(entries.row_n)
        needed = sum(tensor.nbytes for tensor in (entries.row_n, entries.exp_n, entries.count_V))
        if needed > self.room or start + size > len(self.row_m):
            return False
        self.row_m[start : start + size] = entries.row_n
        self.exp_m[start : start + size] = entries.exp_n
        self.count_SV[len(self.ends) - 1] = entries.count_V
        self.room -= needed
        self.ends.append(start + size)
        return True

    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """The written parts of `row_m`, `exp_m` and `count_SV`."""
        return self.row_m[: self.ends[-1]], self.exp_m[: self.ends[-1]], self.count_SV[: len(self.ends) - 1]


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Gradients that the backward adds up, in the dtype of the logits; None where not needed."""

    hidden_TH: Tensor | None  # with respect to hidden / temperature
    weight_VH: Tensor | None  # with respect to the head's weight

    def add_chosen(self, coefficient_T: Tensor, tokens_T: Tensor, operands: Operands) -> None:
        """Add the gradient through the sampled tokens' own logits; by chunk, to copy few hidden states at a time."""
        for start in range(0, len(tokens_T), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            tokens_C, coefficient_C1 = tokens_T[rows], coefficient_T[rows, None]
            if self.hidden_TH is not None:
                self.hidden_TH[rows].addcmul_(operands.weight_VH[tokens_C], coefficient_C1)
            if self.weight_VH is not None:
                self.weight_VH.index_add_(0, tokens_C, operands.scaled(rows) * coefficient_C1)


def chunk_width(rows: int, weight_VH: Tensor) -> int:
    """Rows in a chunk."""
    width = CHUNK_BYTES // (len(weight_VH) * weight_VH.element_size())
    return min(CHUNK_ROWS, max(16, width), max(rows, 1))


def chunks(rows: int, weight_VH: Tensor, allocate: bool = True) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows, each with a flat buffer for its logits; all share its memory."""
    width = chunk_width(rows, weight_VH)
    buffer = weight_VH.new_empty(len(weight_VH) * width if allocate else 0)
    for start in range(0, max(rows, 1), width):  # one chunk even of no rows, for concatenation
        count = min(width, rows - start)
        yield slice(start, start + count), buffer[: len(weight_VH) * count]


def chunk_sums(
    scaled_CH: Tensor, weight_VH: Tensor, tokens_C: Tensor, rule: str, threshold_C1: Tensor, buffer: Tensor
) -> tuple[RowSums, Entries | None]:
    """A chunk's sums, and its safe entries where they are few."""
    vocabulary, count = len(weight_VH), len(scaled_CH)
    logits_VC = torch.mm(weight_VH, scaled_CH.t(), out=buffer.view(vocabulary, count))
    chosen_C = logits_VC.gather(0, tokens_C[None]).squeeze(0)
    max_C = logits_VC.amax(0)
    cut_C = logit_cut(logits_VC.t(), rule, threshold_C1).squeeze(1)
    safe_VC = None if rule == "full" else logits_VC >= cut_C
    shifted_VC = logits_VC.sub_(max_C)
    if safe_VC is None or not safe_VC.is_cpu or safe_VC.count_nonzero() > KEPT_DENSITY * safe_VC.numel():
        return RowSums(max_C, cut_C, chosen_C, *_dense_sums(shifted_VC, safe_VC)), None
    sums, entries = _sparse_sums(shifted_VC, safe_VC)
    return RowSums(max_C, cut_C, chosen_C, shifted_VC.exp_().sum(0), *sums), entries


def _sparse_sums(shifted_VC: Tensor, safe_VC: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Entries]:
    """The last three sums and the entries; by block, to bound the intermediate tensors."""
    count = shifted_VC.shape[1]
    safe_C = shifted_VC.new_zeros(count, dtype=torch.float64)
    moment_C, kept_vocab_C = torch.zeros_like(safe_C), torch.zeros_like(safe_C, dtype=torch.int64)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(shifted_VC), BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        at_m = safe_VC[block].view(-1).nonzero().squeeze(1)
        shifted_m = shifted_VC[block].view(-1)[at_m]
        exp_m = shifted_m.exp()
        token_m = at_m.div(count, rounding_mode="floor")
        row_m = at_m.sub_(token_m * count)
        kept_vocab_C += row_m.bincount(minlength=count)
        # bincount adds one after another: in float32 thousands of equal terms are off by 6e-5 of their sum.
        safe_C += row_m.bincount(exp_m.double(), count)
        moment_C += row_m.bincount(shifted_m.mul_(exp_m).double(), count)
        tokens = len(safe_VC[block])
        parts.append((row_m.to(torch.uint8), exp_m, token_m.bincount(minlength=tokens).int()))
    dtype = shifted_VC.dtype
    return (safe_C.to(dtype), moment_C.to(dtype), kept_vocab_C), Entries(*map(torch.cat, zip(*parts, strict=True)))


def _dense_sums(shifted_VC: Tensor, safe_VC: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last four sums, over a safe set given as a mask; None is the whole vocabulary."""
    all_C, safe_C, moment_C = (shifted_VC.new_zeros(shifted_VC.shape[1]) for _ in range(3))
    for start in range(0, len(shifted_VC), BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        exp_BC = shifted_VC[block].exp()
        all_C += exp_BC.sum(0)
        if safe_VC is not None:
            exp_BC.masked_fill_(~safe_VC[block], 0.0)
        safe_C += exp_BC.sum(0)
        moment_C += exp_BC.mul_(shifted_VC[block]).sum(0)
    kept_vocab_C = torch.full_like(all_C, len(shifted_VC), dtype=torch.int64) if safe_VC is None else safe_VC.sum(0)
    return all_C, safe_C, moment_C, kept_vocab_C


def add_entries(
    gradients: GradientSums, entries: Entries, scale_C: Tensor, scaled_CH: Tensor, weight_VH: Tensor, rows: slice
) -> None:
    """Add the products of scale × e over a chunk's kept entries with the weight and with the hidden states."""
    active_C = scale_C != 0
    if not active_C.any():
        return
    some = not active_C.all()
    bounds = [0, *(entries.count_V.cumsum(0)[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist()), len(entries.row_n)]
    for block, start in enumerate(range(0, len(weight_VH), BLOCK_TOKENS)):
        tokens, part = slice(start, start + BLOCK_TOKENS), slice(bounds[block], bounds[block + 1])
        row_m, exp_m, count_B = entries.row_n[part].int(), entries.exp_n[part], entries.count_V[tokens]
        token_m = torch.arange(len(count_B), dtype=torch.int32).repeat_interleave(count_B)
        if some:
            active_m = active_C[row_m].nonzero().squeeze(1)
            row_m, exp_m, token_m = row_m[active_m], exp_m[active_m], token_m[active_m]
            count_B = token_m.bincount(minlength=len(count_B)).int()
        value_m = exp_m * scale_C[row_m]
        if gradients.weight_VH is not None:
            starts_B = count_B.cumsum(0, dtype=torch.int32) - count_B
            gradients.weight_VH[tokens] += embedding_bag(
                row_m, scaled_CH, starts_B, mode="sum", per_sample_weights=value_m
            )
        if gradients.hidden_TH is not None:
            gradients.hidden_TH[rows] += _by_row(weight_VH[tokens], token_m, row_m, value_m, len(scale_C))


def _by_row(weight_BH: Tensor, token_m: Tensor, row_m: Tensor, value_m: Tensor, count: int) -> Tensor:
    """Σ value × the token's row of the weight, over the entries of each of `count` rows: [C, H]."""
    parts = -(-len(weight_BH) // CACHED_TOKENS)
    # By part of the block, then row: keys fit 16 bits, and the sort is two counting passes.
    key_m = token_m.div(CACHED_TOKENS, rounding_mode="floor").mul_(count).add_(row_m).to(torch.int16)
    order_m = key_m.sort(stable=True).indices
    count_K = key_m.bincount(minlength=parts * count)
    sums_KH = embedding_bag(
        token_m[order_m],
        weight_BH,
        (count_K.cumsum(0) - count_K).int(),
        mode="sum",
        per_sample_weights=value_m[order_m],
    )
    return sums_KH.view(parts, count, weight_BH.shape[1]).sum(0)


def add_dense(
    gradients: GradientSums,
    rows_T: Tensor,
    factor_T: Tensor,
    norm_T: Tensor,
    rule: str,
    threshold_T1: Tensor,
    operands: Operands,
) -> None:
    """Add the products of factor × exp(z − norm) over the safe sets of the flagged rows, computed again.

    Other rows share the matmul, so rounding may differ from the forward's. The cut is set from these logits; a logit
    within rounding of it may change sides.
    """
    index_R = rows_T.nonzero().squeeze(1)
    if len(index_R) == 0:
        return
    weight_VH = operands.weight_VH
    for part, buffer in chunks(len(index_R), weight_VH):
        index_C = index_R[part]
        scaled_CH = operands.scaled(index_C)
        probs_VC = torch.mm(weight_VH, scaled_CH.t(), out=buffer.view(len(weight_VH), len(index_C)))
        cut_C = logit_cut(probs_VC.t(), rule, threshold_T1[index_C]).squeeze(1)
        pruned_VC = None if rule == "full" else probs_VC < cut_C
        probs_VC.sub_(norm_T[index_C]).exp_().mul_(factor_T[index_C])
        if pruned_VC is not None:
            probs_VC.masked_fill_(pruned_VC, 0.0)
        if gradients.hidden_TH is not None:
            gradients.hidden_TH[index_C] = torch.mm(probs_VC.t(), weight_VH)
        if gradients.weight_VH is not None:
            gradients.weight_VH.addmm_(probs_VC, scaled_CH)
