"""Packing: the sequences of a micro-batch laid end to end in one row, so that no linear layer sees padding.

Attention alone is computed per sequence, on a padded view of the row (causal, and the padding comes last, so
that it is never attended to).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of one packed row lie.

    Attributes:
        lengths_N: tokens of each of the N sequences; they sum to P, the length of the row.
        index_NL: position in the row of token l of sequence n, padded to the longest, L, with 0.
        token_P: for each position of the row, its place in the flattened padded view.
        positions_P: position of each token within its own sequence.
    """

    lengths_N: tuple[int, ...]
    index_NL: Tensor
    token_P: Tensor
    positions_P: Tensor


def pack(lengths: Sequence[int], device: torch.device | str = "cpu") -> Packing:
    """The layout of sequences of these lengths, laid end to end."""
    lengths_N = torch.tensor(lengths)
    starts_N = lengths_N.cumsum(0) - lengths_N
    offsets_L = torch.arange(max(lengths))
    real_NL = offsets_L < lengths_N[:, None]
    return Packing(
        lengths_N=tuple(lengths),
        index_NL=torch.where(real_NL, starts_N[:, None] + offsets_L, 0).to(device),
        token_P=real_NL.flatten().nonzero().squeeze(1).to(device),
        positions_P=offsets_L.expand(len(lengths), -1)[real_NL].to(device),
    )


def padded(rows_PD: Tensor, packing: Packing) -> Tensor:
    """The padded view [N, L, D] of a packed row [P, D]; what stands in the padding is arbitrary, but finite."""
    return cast(Tensor, _Padded.apply(rows_PD, packing))  # type: ignore[no-untyped-call]


def unpadded(view_NLD: Tensor, packing: Packing) -> Tensor:
    """The packed row [P, D] of a padded view."""
    return view_NLD.flatten(0, 1).index_select(0, packing.token_P)


class _Padded(torch.autograd.Function):
    """Every position of the row appears once outside the padding, and the padding sends no gradient: so the gradient
    is read back rather than added up, as indexing would do, which costs three times the forward."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return rows_PD.index_select(0, packing.index_NL.flatten()).view(*packing.index_NL.shape, rows_PD.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient_NLD: Tensor) -> tuple[Tensor, None]:
        return unpadded(gradient_NLD, ctx.packing), None


@dataclass(frozen=True, slots=True)
class Batch:
    """N sequences (prompt, then response) packed for the trainer; T response tokens in a row of P tokens.

    Attributes:
        tokens_P: int64, token ids of the row.
        packing: where the sequences lie.
        predict_T: int64, the position in the row whose hidden state predicts response token t.
        targets_T: int64, the response tokens themselves.
        sequence_T: int64, the sequence, 0 to N − 1, of each response token.
        responses_N: tokens of each response; they sum to T.
    """

    tokens_P: Tensor
    packing: Packing
    predict_T: Tensor
    targets_T: Tensor
    sequence_T: Tensor
    responses_N: tuple[int, ...]

    def places(self) -> list[int]:
        """The place of each response token in its response, from 0: T numbers."""
        return [place for length in self.responses_N for place in range(length)]

    def of_tokens(self, values_N: Sequence[Value]) -> list[Value]:
        """What belongs to a sequence, such as its seed, once for each of its response tokens: T values."""
        return [value for value, length in zip(values_N, self.responses_N, strict=True) for _ in range(length)]


def pack_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> Batch:
    """One micro-batch; prompts must hold a token each (the first response token is predicted from the last one)."""
    packing = pack([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], device)
    row: list[int] = []
    predict: list[int] = []
    sequence: list[int] = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        first = len(row) + len(prompt)
        predict += range(first - 1, first - 1 + len(response))
        sequence += [index] * len(response)
        row += [*prompt, *response]
    targets = [token for response in responses for token in response]
    tokens_P, predict_T, targets_T, sequence_T = (
        torch.tensor(values, dtype=torch.int64, device=device) for values in (row, predict, targets, sequence)
    )
    return Batch(tokens_P, packing, predict_T, targets_T, sequence_T, tuple(map(len, responses)))


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: at most `token_budget` tokens, or one longer sequence.

    Neighbours in length share a micro-batch: the padded view of the attention is then nearly full.
    """
    groups: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if lengths[index] > room:
            groups.append([])
            room = token_budget
        groups[-1].append(index)
        room -= lengths[index]
    return groups
