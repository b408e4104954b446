"""The logits processor inside vLLM: disturbs, masks, and records log Z' and |V'_S|."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tailrl.config.sampler import Disturbance
from tailrl.objective.disturbance import UNDISTURBED, disturb
from tailrl.objective.noise import gumbel
from tailrl.objective.safe_set import logit_cut
from tailrl.rollout import is_kept


@dataclass(slots=True)
class _Row:
    """A row of the engine's batch: its request, its decoding, and vLLM's running list of its sampled tokens."""

    tokens: list[int]
    request: int = -1
    seed: int = 0
    start: int = 0
    rule: str = "full"
    threshold: float = 0.0
    disturbance: Disturbance = UNDISTURBED
    shared_noise: bool = False
    keep_every: int = 0

    @property
    def position(self) -> int:
        """Position in the response of the next token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class SafeSetRecord:
    """log Z' and |V'_S| of sampled tokens: entry i is about sampled token `index[i]` of request `request[i]`.

    `logits` has request, index and undisturbed logits [V] of kept positions (`rollout.is_kept`).
    """

    request: NDArray[np.int64]
    index: NDArray[np.int64]
    log_kept: NDArray[np.float32]
    kept_vocab: NDArray[np.int32]
    logits: Sequence[tuple[int, int, Tensor]] = ()


class SafeSetProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    """Disturbs the logits, masks those outside V'_S, and records log Z' and |V'_S| of every row and step.

    A row that vLLM runs again (a preempted request) records the same index again; its last entry was sampled from.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self.rows: dict[int, _Row] = {}
        self.records: list[tuple[list[int], list[int], Tensor, Tensor]] = []
        self.kept_logits: list[tuple[int, int, Tensor]] = []

    def is_argmax_invariant(self) -> bool:
        """True, so that vLLM calls the processor after the temperature. The mask never removes the most probable token.
        Noise may change it, but only greedy requests skip such processors, and no request is greedy."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as vLLM removes, adds and moves them, in the order of its contract."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, tokens in batch_update.added:
            row = self.rows[index] = _Row(tokens, **(params.extra_args or {}))
            row.disturbance = Disturbance.model_validate(row.disturbance)
        for source, target, direction in batch_update.moved:
            moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = displaced

    def apply(self, logits: Tensor) -> Tensor:
        """Disturb and mask float32 logits [rows, V] in place, each row by its request's settings."""
        rows = [self.rows[index] for index in range(logits.shape[0])]
        for index, row in enumerate(rows):
            if is_kept(row.seed, row.position, row.keep_every):
                self.kept_logits.append((row.request, len(row.tokens), logits[index].clone()))
        for disturbance in {row.disturbance for row in rows if row.disturbance.on_logits}:
            chosen = [index for index, row in enumerate(rows) if row.disturbance == disturbance]
            seeds, positions = [rows[index].seed for index in chosen], [rows[index].position for index in chosen]
            logits[chosen] = disturb(logits[chosen], seeds, positions, disturbance)
        log_kept = torch.zeros(len(rows), device=logits.device)
        kept_vocab = torch.full((len(rows),), logits.shape[1], dtype=torch.int32, device=logits.device)
        rules = {row.rule for row in rows} - {"full"}
        if rules:
            cut = torch.full((len(rows), 1), -torch.inf, device=logits.device)
            for rule in rules:
                chosen = [index for index, row in enumerate(rows) if row.rule == rule]
                threshold = torch.tensor([[rows[index].threshold] for index in chosen], device=logits.device)
                cut[chosen] = logit_cut(logits[chosen], rule, threshold)
            safe = logits >= cut
            log_sum = logits.logsumexp(-1)
            logits.masked_fill_(~safe, -torch.inf)
            log_kept = logits.logsumexp(-1) - log_sum
            kept_vocab = safe.sum(-1, dtype=torch.int32)
        self.records.append(([row.request for row in rows], [len(row.tokens) for row in rows], log_kept, kept_vocab))
        drawn = [index for index, row in enumerate(rows) if row.shared_noise]
        if drawn:
            seeds, positions = [rows[index].seed for index in drawn], [rows[index].position for index in drawn]
            noise = gumbel(seeds, positions, logits.shape[1]).to(logits.device)
            token = (logits[drawn] + noise).argmax(-1)
            # Only one token is left for vLLM to draw.
            logits[drawn] = -torch.inf
            logits[drawn, token] = 0.0
        return logits

    def take(self) -> SafeSetRecord:
        """Everything recorded since the last call."""
        (records, self.records), (kept_logits, self.kept_logits) = (self.records, []), (self.kept_logits, [])
        return SafeSetRecord(
            request=np.array([i for requests, *_ in records for i in requests], dtype=np.int64),
            index=np.array([t for _, indices, *_ in records for t in indices], dtype=np.int64),
            log_kept=torch.cat([record[2] for record in records]).cpu().numpy(),
            kept_vocab=torch.cat([record[3] for record in records]).cpu().numpy(),
            logits=kept_logits,
        )
