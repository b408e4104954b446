"""The logits processor for vLLM's Model Runner V1, which the CPU has: called after the temperature."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tailrl.rollout.vllm.recorder import RequestArguments, SafeSetRecorder, SharedDecoding, StepRows, decoded_alike


@dataclass(slots=True)
class _Row:
    """A row of the engine's batch: its request, its decoding, and vLLM's running list of its sampled tokens."""

    tokens: list[int]
    request: int
    seed: int
    start: int
    threshold: float
    shared: SharedDecoding


class SafeSetProcessor(SafeSetRecorder, LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    """The recorder, which follows the rows of Model Runner V1."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        super().__init__()
        self.rows: dict[int, _Row] = {}

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
            given = RequestArguments(**(params.extra_args or {}))
            self.rows[index] = _Row(tokens, given.request, given.seed, given.start, given.threshold, given.shared())
        for source, target, direction in batch_update.moved:
            moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = displaced

    def apply(self, logits: Tensor) -> Tensor:
        """Disturb and mask float32 logits [rows, V] in place, each row by its request's settings."""
        rows = [self.rows[index] for index in range(logits.shape[0])]
        index_S = np.array([len(row.tokens) for row in rows])
        kinds = list(dict.fromkeys(row.shared for row in rows))
        return self.constrain(
            logits,
            StepRows(
                request_S=np.array([row.request for row in rows]),
                index_S=index_S,
                seed_S=np.array([row.seed for row in rows]),
                position_S=np.array([row.start for row in rows]) + index_S,
                threshold_S1=torch.tensor([[row.threshold] for row in rows], device=logits.device),
                groups=decoded_alike(kinds, np.array([kinds.index(row.shared) for row in rows])),
            ),
        )
