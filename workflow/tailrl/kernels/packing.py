"""Packing: the sequences of a micro-batch in one row, so that no linear layer sees padding or a prompt twice.

Responses to one prompt share its tokens: the prompt stands in the row once, and each response's own tokens follow.
Only attention is computed per sequence. In half precision on a GPU it takes the row as it is (`kernels.varlen`). Else
it takes a padded view of the row that repeats shared prompts. It is causal and the padding comes last, so that nothing
attends to it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tailrl.kernels.varlen import Segments

Value = TypeVar("Value")


class LazySegments:
    """The row of a packing for attention without padding: made by the first layer that asks, kept for the others.

    It is no dataclass: FSDP2 copies those among a layer's arguments, and each layer would make its own.
    """

    def __init__(self, *sizes: Sequence[int], device: torch.device) -> None:
        """`sizes`: `pack`'s lengths, prefixes and prefix_N."""
        self.sizes, self.device = sizes, device

    @cached_property
    def made(self) -> Segments:
        """The segments."""
        lengths, prefixes, owners = self.sizes
        return Segments.of(lengths, prefixes, owners, self.device)


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of N sequences in one packed row of P tokens."""

    index_NL: Tensor  # index in the row of token l of sequence n, padded to the longest, L, with 0
    token_P: Tensor  # index in the flattened padded view of each token of the row; the first of several, if shared
    positions_P: Tensor  # position of each token in its sequence, prompt included
    # Slices of the row that several sequences begin with, each with these sequences.
    shared: tuple[tuple[slice, Tensor], ...]
    lazy: LazySegments

    @property
    def segments(self) -> Segments:
        """The row for attention without padding."""
        return self.lazy.made


def pack(
    lengths: Sequence[int],
    prefixes: Sequence[int] = (0,),
    prefix_N: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Packing:
    """The layout of sequences: all prefixes end to end, then each sequence's own tokens.

    Args:
        lengths: number of each sequence's own tokens.
        prefixes: number of each prefix's tokens.
        prefix_N: each sequence's prefix, by default the first; every prefix is used.
        device: of the tensors.
    """
    owner_N = torch.zeros(len(lengths), dtype=torch.int64) if prefix_N is None else torch.tensor(prefix_N)
    own_N, prefix_U = torch.tensor(lengths), torch.tensor(prefixes)
    before_N, end_U = prefix_U[owner_N], prefix_U.cumsum(0)
    start_N = end_U[-1] + own_N.cumsum(0) - own_N
    offset_L = torch.arange(int((before_N + own_N).max()))
    in_prefix_NL = offset_L < before_N[:, None]
    index_NL = offset_L + torch.where(in_prefix_NL, (end_U - prefix_U)[owner_N, None], (start_N - before_N)[:, None])
    real_NL = offset_L < (before_N + own_N)[:, None]
    view_NL = torch.arange(index_NL.numel()).view_as(index_NL)
    owners = [(owner_N == prefix).nonzero().squeeze(1) for prefix in range(len(prefixes))]
    # The first sequence of each prefix stands for all of them.
    firsts = [view_NL[own[0], :length] for own, length in zip(owners, prefixes, strict=True)]
    token_P = torch.cat([*firsts, view_NL[real_NL & ~in_prefix_NL]])
    positions_P = offset_L.expand_as(index_NL).flatten()[token_P]
    runs = [slice(end - length, end) for end, length in zip(end_U.tolist(), prefixes, strict=True)]
    token_P = token_P.to(device)
    return Packing(
        index_NL=index_NL.masked_fill(~real_NL, 0).to(device),
        token_P=token_P,
        positions_P=positions_P.to(device),
        shared=tuple(
            (run, own.to(device))
            for run, own in zip(runs, owners, strict=True)
            if len(own) > 1 and run.start < run.stop
        ),
        lazy=LazySegments(lengths, prefixes, owner_N.tolist(), device=token_P.device),
    )


def padded(rows_PD: Tensor, packing: Packing) -> Tensor:
    """The padded view [N, L, D] of a packed row [P, D]; its padding is arbitrary but finite."""
    return cast(Tensor, _Padded.apply(rows_PD, packing))  # type: ignore[no-untyped-call]


def unpadded(view_NLD: Tensor, packing: Packing) -> Tensor:
    """The packed row [P, D] of a padded view."""
    return view_NLD.flatten(0, 1).index_select(0, packing.token_P)


class _Padded(torch.autograd.Function):
    """Gathers its gradient; adding it up, as indexing would, costs three times the forward.

    The padding sends no gradient, and every token of the row appears once, except shared prefixes, which are summed.
    """

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return rows_PD.index_select(0, packing.index_NL.flatten()).view(*packing.index_NL.shape, rows_PD.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient_NLD: Tensor) -> tuple[Tensor, None]:
        gradient_PD = unpadded(gradient_NLD, ctx.packing)
        for run, sequences in ctx.packing.shared:
            gradient_PD[run] = gradient_NLD[sequences, : run.stop - run.start].sum(0)
        return gradient_PD, None


@dataclass(frozen=True, slots=True)
class Batch:
    """N sequences (prompt, then response) packed for the trainer; a row of P tokens predicts T response tokens.

    The last token of a response predicts nothing and is not in the row.
    """

    tokens_P: Tensor  # int64, token ids of the row
    packing: Packing  # layout of the sequences
    predict_T: Tensor  # int64, index in the row of the hidden state that predicts response token t
    targets_T: Tensor  # int64, the response tokens
    sequence_T: Tensor  # int64, the sequence of each response token, 0 to N − 1
    responses_N: tuple[int, ...]  # tokens of each response; they sum to T

    def positions(self) -> list[int]:
        """The position of each response token in its response, from 0: T numbers."""
        return [position for length in self.responses_N for position in range(length)]

    def of_tokens(self, values_N: Sequence[Value]) -> list[Value]:
        """Values of sequences, such as seeds, repeated for each response token: T values."""
        return [value for value, length in zip(values_N, self.responses_N, strict=True) for _ in range(length)]


def pack_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    marks: Sequence[Hashable] | None = None,
) -> Batch:
    """One micro-batch; each prompt needs a token, since its last one predicts the first response token.

    Equal prompts share their tokens in the row; with `marks`, one a response, those whose marks are equal too.
    """
    keys = list(zip(map(tuple, prompts), marks or [None] * len(prompts), strict=True))
    number = {key: unique for unique, key in enumerate(dict.fromkeys(keys))}
    prefix_N = [number[key] for key in keys]
    lengths = [len(prompt) for prompt, _ in number]
    packing = pack([max(len(response) - 1, 0) for response in responses], lengths, prefix_N, device)
    row = [token for prompt, _ in number for token in prompt]
    ends = [run - 1 for run in accumulate(lengths)]
    predict: list[int] = []
    for unique, response in zip(prefix_N, responses, strict=True):
        if response:
            predict += [ends[unique], *range(len(row), len(row) + len(response) - 1)]
            row += response[:-1]
    sequence = [index for index, response in enumerate(responses) for _ in response]
    targets = [token for response in responses for token in response]
    tokens_P, predict_T, targets_T, sequence_T = (
        torch.tensor(values, dtype=torch.int64, device=device) for values in (row, predict, targets, sequence)
    )
    return Batch(tokens_P, packing, predict_T, targets_T, sequence_T, tuple(map(len, responses)))


def micro_batches(
    prompts: Sequence[tuple[int, ...]],
    responses: Sequence[int],
    token_budget: int,
    marks: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """The sequences' indices in each micro-batch: at most `token_budget` tokens, or one longer sequence.

    Responses to one prompt share a micro-batch where they fit, and so do neighbours in length: attention's padded view
    is then nearly full.

    Args:
        prompts: of each sequence; equal prompts in a micro-batch count once, if their marks are equal too.
        responses: number of tokens of each response.
        token_budget: most tokens in a micro-batch.
        marks: one a response, as `pack_batch` gets them; None: equal prompts share their tokens.
    """
    keys = list(zip(prompts, marks or [None] * len(prompts), strict=True))
    longest: dict[tuple[int, ...], int] = {}
    for prompt, response in zip(prompts, responses, strict=True):
        longest[prompt] = max(longest.get(prompt, 0), len(prompt) + response)
    first = {prompt: number for number, prompt in enumerate(longest)}
    groups: list[list[int]] = []
    seen: set[tuple[tuple[int, ...], Hashable]] = set()
    room = 0
    for index in sorted(range(len(prompts)), key=lambda i: (longest[prompts[i]], first[prompts[i]], responses[i], i)):
        prompt, own = prompts[index], responses[index]
        needed = own if keys[index] in seen else len(prompt) + own
        if needed > room or not groups:
            groups.append([])
            room, seen, needed = token_budget, set(), len(prompt) + own
        room -= needed
        seen.add(keys[index])
        groups[-1].append(index)
    return groups
