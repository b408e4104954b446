"""Hugging Face transformers as the rollout engine: the library's own model, attention and cache.

It runs where vLLM does not, and is a third arithmetic beside vLLM's and the trainer's. Sequences are left-padded to one
length and go through the model's ordinary forward, one token per step, over a cache with room to grow. Each token's
noise is its own, so the batch can change only the rounding of its logits. Ended sequences leave the batch, with padding
no longer needed, once they are an eighth of it. Waiting requests are admitted in groups. A prompt of several requests
runs once.

The library's own loops cannot do this. `generate` and continuous batching (`generate_batch`) draw all rows with one
`torch.multinomial` from one generator: a response would depend on its neighbours and their order, and neither Z' nor
|V'_S| is returned. A logits processor of continuous batching gets only 32-bit numbers fixed with the request, not each
row's response and position, so it can neither seed nor disturb them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.packing import micro_batches
from tailrl.objective.disturbance import disturb
from tailrl.rollout import Decoding
from tailrl.rollout.growing_cache import growing_cache
from tailrl.rollout.sampling import DrawnStep, LocalSampler, draw, stop_tokens, token_bytes
from tailrl.rollout.self_test import record_error, shortened, tolerance
from tailrl.rollout.types import Request
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError

SEQUENCES_IN_FLIGHT = 128
ADMITTED_AT_ONCE = 16
ENDED_SHARE = 8  # ended sequences stay until one in so many has ended: removing them copies the cache
PREFILL_TOKENS = 4096
CACHE_BYTES = 2 * 2**30  # limits the sequences in flight by the memory of their keys and values
DRIFT_TOLERANCE = {"float64": 1e-5, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest accepted mean total variation between padded, cached steps and the sequence run whole and alone."""


@dataclass(slots=True)
class _Rows:
    """S sequences in flight, padded on the left to a common length L."""

    request_S: Tensor
    index_S: Tensor  # of the next token among those sampled for the request
    ended_S: Tensor  # further draws of such a row are ignored
    mask_SL: Tensor  # int64, 1 for a token that the model has seen, 0 for padding
    cache: Cache
    logits_SV: Tensor  # of the next token, in the model's dtype

    def selected(self, row_R: Tensor) -> "_Rows":
        """Some rows, by index, without padding that they do not need."""
        mask_RL = self.mask_SL[row_R]
        first = int(mask_RL.any(0).int().argmax())
        layers = [(layer.keys[row_R, :, first:], layer.values[row_R, :, first:]) for layer in self.cache.layers]
        return _Rows(
            self.request_S[row_R],
            self.index_S[row_R],
            self.ended_S[row_R],
            mask_RL[:, first:],
            growing_cache(layers),
            self.logits_SV[row_R],
        )

    @classmethod
    def joined(cls, parts: Sequence["_Rows"]) -> "_Rows":
        """The rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        length = max(part.mask_SL.shape[1] for part in parts)
        missing = [length - part.mask_SL.shape[1] for part in parts]

        def widened(states: Iterable[Tensor]) -> Tensor:
            return torch.cat([pad(state, (0, 0, more, 0)) for state, more in zip(states, missing, strict=True)])

        layers = [
            (widened(layer.keys for layer in same), widened(layer.values for layer in same))
            for same in zip(*(part.cache.layers for part in parts), strict=True)
        ]
        return cls(
            torch.cat([part.request_S for part in parts]),
            torch.cat([part.index_S for part in parts]),
            torch.cat([part.ended_S for part in parts]),
            torch.cat([pad(part.mask_SL, (more, 0)) for part, more in zip(parts, missing, strict=True)]),
            growing_cache(layers),
            torch.cat([part.logits_SV for part in parts]),
        )


class TransformersSampler(LocalSampler):
    """A `Sampler` over a transformers model in this process."""

    seen: dict[tuple[int, int], Tensor] | None = None  # logits [V] of each request's tokens, in the model's dtype

    def __init__(self, policy_folder: Path, settings: SamplerSettings, max_length: int, *_: object) -> None:
        """See `make_sampler`; the engine needs no seed of its own, nor to know of a trainer beside it."""
        dtype = settings.dtype
        config = AutoConfig.from_pretrained(policy_folder, trust_remote_code=False)
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers):
            raise ModelError(
                f"{policy_folder}: {config.model_type} keeps more of a sequence than keys and values, which the "
                "transformers engine does not support"
            )
        if dtype == "float64" and getattr(config, "num_experts", None):
            config._experts_implementation = "eager"  # grouped products have no float64
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.device = distributed.device()
        self.model.eval().requires_grad_(False).to(self.device)
        self.dtype = dtype
        self.max_length = max_length
        fitting = max(1, CACHE_BYTES // (max_length * token_bytes(config, self.model.dtype)))
        self.most = min(SEQUENCES_IN_FLIGHT, fitting)
        self.stop = torch.tensor(stop_tokens(policy_folder), device=self.device)

    @torch.inference_mode()
    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """Check the log-probs against the sampler's distribution, and this distribution against the model's.

        The first check is float64 on the logits that each token was drawn from. The second runs each sequence whole and
        alone, without padding or cache.

        Returns:
            The largest error, nats, of a log π'^mp or log Z' against float64.

        Raises:
            StudyError: it exceeds `self_test.tolerance`, or the distributions differ by more than `DRIFT_TOLERANCE`.
        """
        seen = self.seen = {}
        try:
            rollouts = self.generate(requests, shortened(decoding))
        finally:
            self.seen = None
        errors, drifts = [], []
        for index, (request, rollout) in enumerate(zip(requests, rollouts, strict=True)):
            logits_TV = torch.stack([seen[index, token] for token in range(len(rollout.tokens))]).float()
            positions = range(request.start, request.start + len(logits_TV))
            disturbed_TV = disturb(
                logits_TV / decoding.temperature, [request.seed] * len(positions), positions, decoding.disturbance
            )
            errors.append(record_error(request, rollout, disturbed_TV.cpu(), decoding.rule))
            tokens = torch.tensor([[*request.prompt_tokens, *rollout.tokens[:-1]]], device=self.device)
            alone_TV = self.model(input_ids=tokens, use_cache=False).logits[0, len(request.prompt_tokens) - 1 :]
            drifts.append((logits_TV.softmax(-1) - alone_TV.float().softmax(-1)).abs().sum(-1).mean().item() / 2)
        if not max(errors) <= tolerance(self.model.config.vocab_size):
            raise ModelError(
                "the log-probs of the transformers engine are not those of the distribution it samples from: they "
                f"differ by {max(errors):.2g} nats"
            )
        drift = float(np.mean(drifts))
        if not drift <= DRIFT_TOLERANCE[self.dtype]:
            raise ModelError(
                "transformers gives this policy another distribution in a padded batch with a cache than alone: they "
                f"differ by a total variation of {drift:.2g}"
            )
        return max(errors)

    def steps(self, requests: Sequence[Request], limits: Sequence[int], decoding: Decoding) -> Iterator[DrawnStep]:
        """See `LocalSampler.steps`; the batch changes a token only where rounding decides between two."""
        waiting = deque(range(len(requests)))
        start_N = torch.tensor([request.start for request in requests], device=self.device)
        threshold_N = torch.tensor([request.threshold for request in requests], dtype=torch.float32, device=self.device)
        limit_N = torch.tensor(limits, device=self.device)
        rows: _Rows | None = None
        while rows is not None or waiting:
            rows = self._admit(rows, waiting, requests)
            seeds = [requests[index].seed for index in rows.request_S.tolist()]
            positions = (rows.index_S + start_N[rows.request_S]).tolist()
            logits_SV = disturb(rows.logits_SV.float() / decoding.temperature, seeds, positions, decoding.disturbance)
            drawn = draw(logits_SV, decoding.rule, threshold_N[rows.request_S, None], seeds, positions)
            going_S = ~rows.ended_S
            # A copy of so many logits is for those that are kept.
            kept_SV = logits_SV[going_S] if decoding.keep_every else logits_SV
            step = DrawnStep(rows.request_S[going_S], rows.index_S[going_S], drawn.at(going_S), kept_SV)
            if self.seen is not None:
                where = zip(step.request_S.tolist(), step.index_S.tolist(), strict=True)
                self.seen.update(zip(where, rows.logits_SV[going_S], strict=True))
            yield step
            token_S = drawn.token_S
            rows.ended_S = rows.ended_S | torch.isin(token_S, self.stop) | (rows.index_S + 1 >= limit_N[rows.request_S])
            ended = int(rows.ended_S.sum())
            if ended == len(token_S):
                rows = None
                continue
            if ended * ENDED_SHARE >= len(token_S):
                going_R = (~rows.ended_S).nonzero().flatten()
                rows, token_S = rows.selected(going_R), token_S[going_R]
            rows.index_S = rows.index_S + 1
            rows.mask_SL = pad(rows.mask_SL, (0, 1), value=1)
            rows.logits_SV = self._forward(token_S[:, None], rows.mask_SL, rows.cache)

    def _admit(self, rows: _Rows | None, waiting: deque[int], requests: Sequence[Request]) -> _Rows:
        """The rows, with waiting requests admitted once there is room for many."""
        room = self.most - (0 if rows is None else len(rows.request_S))
        count = min(room, len(waiting))
        if rows is not None and count < min(ADMITTED_AT_ONCE, max(1, len(waiting))):
            return rows
        begun = self._prefill([waiting.popleft() for _ in range(count)], requests)
        return _Rows.joined(begun if rows is None else [rows, *begun])

    def _prefill(self, admitted: Sequence[int], requests: Sequence[Request]) -> list[_Rows]:
        """Rows of these requests after their prompts have run."""
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index in admitted:
            sharing.setdefault(requests[index].prompt_tokens, []).append(index)
        prompts = list(sharing)
        begun = []
        for group in micro_batches(prompts, [0] * len(prompts), PREFILL_TOKENS):
            chosen = [prompts[i] for i in group]
            longest = max(map(len, chosen))
            padded = [[*[0] * (longest - len(prompt)), *prompt] for prompt in chosen]
            tokens_SL = torch.tensor(padded, device=self.device)
            length_S1 = torch.tensor([[len(prompt)] for prompt in chosen], device=self.device)
            mask_SL = (torch.arange(longest, device=self.device) >= longest - length_S1).long()
            cache = growing_cache()
            logits_SV = self._forward(tokens_SL, mask_SL, cache)
            nothing_S = torch.zeros(len(chosen), dtype=torch.int64, device=self.device)
            once = _Rows(nothing_S, nothing_S, nothing_S.bool(), mask_SL, cache, logits_SV)
            shared = [(row, index) for row, prompt in enumerate(chosen) for index in sharing[prompt]]
            row_S, request_S = torch.tensor(shared, device=self.device).T
            rows = once.selected(row_S)
            rows.request_S = request_S
            begun.append(rows)
        return begun

    def _forward(self, tokens_SN: Tensor, mask_SL: Tensor, cache: Cache) -> Tensor:
        """Logits [S, V] after the last N tokens of each row; the cache holds the earlier tokens and takes in these."""
        # An ended row goes on for a while, but must not pass the policy's last position.
        position_SL = (mask_SL.cumsum(-1) - 1).clamp(0, self.max_length - 1)
        output = self.model(
            input_ids=tokens_SN,
            attention_mask=mask_SL,
            position_ids=position_SL[:, -tokens_SN.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cast(Tensor, output.logits[:, -1])
