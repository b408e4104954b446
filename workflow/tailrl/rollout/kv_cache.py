"""The exact engine's sequences in flight, with their keys and values."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.kernels.batch_invariant import (
    GPU_ROWS,
    KEYS,
    PackedAttention,
    causal_attention,
    future_bias,
    pad_rows,
    rounded_up,
)
from tailrl.kernels.packing import micro_batches, pack
from tailrl.model.forward import exact_hidden_states, head_size, head_weight, key_group, key_heads, row_multiple
from tailrl.rollout.sampling import token_bytes
from tailrl.rollout.types import Request

SEQUENCES_IN_FLIGHT = 128
ADMITTED_AT_ONCE = 16
PREFILL_TOKENS = 4096
CACHE_BYTES = 2 * 2**30  # limits the sequences in flight by the memory of their keys and values, but never below 16


class KeyValueCache:
    """Keys and values of every layer, one row per sequence in flight; unwritten entries are zero."""

    def __init__(self, model: PreTrainedModel, count: int, length: int) -> None:
        config = model.config
        size = head_size(config)
        heads, length = key_heads(config), rounded_up(length, KEYS)
        layers = range(config.num_hidden_layers)
        fitting = max(16, CACHE_BYTES // (length * token_bytes(config, model.dtype)))
        self.row_multiple = row_multiple(model)
        self.rows = rounded_up(min(count, SEQUENCES_IN_FLIGHT, fitting), self.row_multiple)
        self.group = key_group(config)
        like = head_weight(model)
        self.key = [like.new_zeros(self.rows, heads, size, length) for _ in layers]
        self.value = [like.new_zeros(self.rows, heads, length, size) for _ in layers]
        self.length = 0

    def step(self, position_S: Tensor) -> None:
        """Set the positions, in their sequences, of the next tokens of the first S rows."""
        self.length = rounded_up(int(position_S.max()) + 1, KEYS)
        self.bias_S1RM = future_bias(position_S[:, None], self.group, self.length)
        self.position_S = position_S

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scaling: float) -> Tensor:
        """See `batch_invariant.Attend`: one token of each row over that row's keys, its own included."""
        row_S = torch.arange(len(query_SHD), device=query_SHD.device)
        key_SKDM, value_SKMD = self.key[layer][: len(row_S)], self.value[layer][: len(row_S)]
        key_SKDM[row_S, :, :, self.position_S] = key_SKD
        value_SKMD[row_S, :, self.position_S] = value_SKD
        keys, values = key_SKDM[..., : self.length], value_SKMD[:, :, : self.length]
        return causal_attention(query_SHD[:, None], keys, values, self.bias_S1RM, scaling).squeeze(1)

    def fill(self, layer: int, row_S: Tensor, key_SKDM: Tensor, value_SKMD: Tensor) -> None:
        """Write the first M keys and values of some rows."""
        length = key_SKDM.shape[-1]
        self.key[layer][row_S, :, :, :length] = key_SKDM
        self.value[layer][row_S, :, :length] = value_SKMD

    def move(self, source_S: Tensor, target_S: Tensor) -> None:
        """Copy rows over others."""
        for tensor in (*self.key, *self.value):
            tensor[target_S] = tensor[source_S]


@dataclass(frozen=True, slots=True)
class Step:
    """One token of each sequence in flight, S rows; rows from `alive` on are padding."""

    alive: int  # sequences in flight
    request_S: Tensor  # int64, each row's request
    index_S: Tensor  # int64, index of the next token among those sampled for the request
    limit_S: Tensor  # int64, longest response, tokens
    threshold_S1: Tensor  # float32, ln ρ, k or p
    seeds: list[int]  # of the responses
    hidden_SH: Tensor  # last hidden states, which predict the next token


class Flight:
    """All requests of a batch: waiting, in flight or done.

    Row i belongs to request `request_S[i]`. Its next input is `token_S[i]` at `position_S[i]` of its sequence, prompt
    included, and `hidden_SH[i]` predicts the token after it. The last `fresh` rows already have it from the prompt.
    """

    def __init__(self, model: PreTrainedModel, requests: Sequence[Request], limits: Sequence[int]) -> None:
        self.model, self.requests = model, requests
        self.waiting = deque(range(len(requests)))
        self.device = head_weight(model).device
        self.prompt_N = self._tensor([len(request.prompt_tokens) for request in requests])
        self.limit_N = self._tensor(limits)
        thresholds = [request.threshold for request in requests]
        self.threshold_N = torch.tensor(thresholds, dtype=torch.float32, device=self.device)
        self.cache = KeyValueCache(model, len(requests), int((self.prompt_N + self.limit_N).max()))
        self.alive = 0
        self.fresh = 0
        # A GPU sums a row of a large vocabulary by a kernel that the number of rows chooses.
        self.drawn_multiple = GPU_ROWS if head_weight(model).is_cuda else self.cache.row_multiple
        places = rounded_up(self.cache.rows, self.drawn_multiple)
        self.hidden_SH = head_weight(model).new_zeros(places, head_weight(model).shape[1])
        nothing_3S = torch.zeros(3, places, dtype=torch.int64, device=self.device)
        self.request_S, self.token_S, self.position_S = nothing_3S

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def admit(self) -> bool:
        """Admit waiting requests once there is room for many; returns whether any sequence is in flight."""
        count = min(self.cache.rows - self.alive, len(self.waiting))
        if count and (count >= ADMITTED_AT_ONCE or count == len(self.waiting) or not self.alive):
            self._prefill([self.waiting.popleft() for _ in range(count)])
        return self.alive > 0

    def _prefill(self, admitted: Sequence[int]) -> None:
        """Keys and values of the prompts, each run once, and the hidden states of their last tokens."""
        rows = slice(self.alive, self.alive + len(admitted))
        self.alive, self.fresh = rows.stop, len(admitted)
        self.request_S[rows] = self._tensor(admitted)
        self.token_S[rows] = self._tensor([self.requests[index].prompt_tokens[-1] for index in admitted])
        self.position_S[rows] = self.prompt_N[self.request_S[rows]] - 1
        sharing: dict[tuple[int, ...], list[int]] = {}
        for row, index in enumerate(admitted, start=rows.start):
            sharing.setdefault(self.requests[index].prompt_tokens, []).append(row)
        prompts = list(sharing)
        for group in micro_batches(prompts, [0] * len(prompts), PREFILL_TOKENS):
            chosen = [prompts[i] for i in group]
            packing = pack([len(prompt) for prompt in chosen], device=self.device)
            row_S = self._tensor([row for prompt in chosen for row in sharing[prompt]])
            prompt_S = self._tensor([i for i, prompt in enumerate(chosen) for _ in sharing[prompt]])
            attend = partial(self._attend_and_keep, PackedAttention.of(packing, self.cache.group), row_S, prompt_S)
            tokens_P = self._tensor([token for prompt in chosen for token in prompt])
            row_PH = exact_hidden_states(self.model, pad_rows(tokens_P), pad_rows(packing.positions_P), attend)
            self.hidden_SH[row_S] = row_PH[packing.index_NL.amax(1)[prompt_S]]

    def _attend_and_keep(
        self, attention: PackedAttention, row_S: Tensor, prompt_S: Tensor, layer: int, *given: Any
    ) -> Tensor:
        _, key_PKD, value_PKD, _ = given
        key_NKDM, value_NKMD = attention.keys(key_PKD), attention.values(value_PKD)
        self.cache.fill(layer, row_S, key_NKDM.index_select(0, prompt_S), value_NKMD.index_select(0, prompt_S))
        return attention.attend(layer, *given)

    def step(self) -> Step:
        """Run one token of every sequence in flight through the model, except those fresh from their prompt."""
        if seen := self.alive - self.fresh:
            run = slice(rounded_up(seen, self.cache.row_multiple))
            self.cache.step(self.position_S[run])
            row_SH = exact_hidden_states(self.model, self.token_S[run], self.position_S[run], self.cache.attend)
            self.hidden_SH[:seen] = row_SH[:seen]
        self.fresh = 0
        used = slice(rounded_up(self.alive, self.drawn_multiple))
        request_S, position_S = self.request_S[used], self.position_S[used]
        return Step(
            alive=self.alive,
            request_S=request_S,
            # Padding has no index; any will do.
            index_S=(position_S - self.prompt_N[request_S] + 1).clamp(min=0),
            limit_S=self.limit_N[request_S],
            threshold_S1=self.threshold_N[request_S, None],
            seeds=[self.requests[index].seed for index in request_S.tolist()],
            hidden_SH=self.hidden_SH[used],
        )

    def advance(self, token_S: Tensor, ended_S: Tensor) -> None:
        """Take in the last step's tokens, and drop the sequences that ended with them."""
        used = slice(len(token_S))
        self.token_S[used] = token_S
        self.position_S[used] += 1
        going_S = (~ended_S[: self.alive]).nonzero().squeeze(1)
        if len(going_S) < self.alive:
            self.alive = len(going_S)
            free_S = ended_S[: self.alive].nonzero().squeeze(1)
            last_S = going_S[self.alive - len(free_S) :]
            for tensor in (self.request_S, self.token_S, self.position_S):
                tensor[free_S] = tensor[last_S]
            self.cache.move(last_S, free_S)
        for tensor in (self.request_S, self.token_S, self.position_S):
            tensor[self.alive :] = 0
