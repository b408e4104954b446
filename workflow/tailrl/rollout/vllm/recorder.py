"""What the logits processors of both of vLLM's model runners do to a step's logits, and what they record of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.config.sampler import Disturbance
from tailrl.objective.disturbance import UNDISTURBED, disturb
from tailrl.objective.noise import gumbel
from tailrl.objective.safe_set import logit_cut

MASKED_AT_ONCE = 2**26
"""Logits masked at a time: 256 MiB of float32. vLLM does not know of this memory; 1,024 rows of 151,936 take 600."""

Rows = slice | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedDecoding:
    """How the requests of a batch are decoded; a request's seed, start and threshold are its own."""

    rule: str = "full"
    disturbance: Disturbance = UNDISTURBED
    shared_noise: bool = False
    keep_every: int = 0


@dataclass(slots=True)
class RequestArguments:
    """What a request says beyond vLLM's own parameters, in their `extra_args`."""

    request: int = -1
    seed: int = 0
    start: int = 0
    threshold: float = 0.0
    temperature: float = 1.0  # what the processor divides by, where vLLM does not
    rule: str = "full"
    disturbance: dict[str, Any] = field(default_factory=dict)
    shared_noise: bool = False
    keep_every: int = 0

    def shared(self) -> SharedDecoding:
        """The part that the requests of a batch share."""
        disturbance = Disturbance.model_validate(self.disturbance)
        return SharedDecoding(self.rule, disturbance, self.shared_noise, self.keep_every)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The S rows of one step of the engine; `threshold_S1` is on the engine's device, the arrays on the host."""

    request_S: NDArray[np.int64]  # −1: a row whose token is not sampled, or that is no request of ours
    index_S: NDArray[np.int64]  # of the next token among the request's sampled tokens
    seed_S: NDArray[np.int64]
    position_S: NDArray[np.int64]  # of the next token in the response
    threshold_S1: Tensor  # float32
    groups: Sequence[tuple[SharedDecoding, Rows]]  # rows that are decoded alike


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


class SafeSetRecorder:
    """Disturbs logits, masks those outside V'_S, and records log Z' and |V'_S| of every row and step.

    The record stays on the engine's device until `take`. A row that vLLM runs again (a preempted request) records the
    same index again; its last entry was sampled from.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor, Tensor]] = []
        self.kept_logits: list[tuple[int, int, Tensor]] = []

    def constrain(self, logits_SV: Tensor, rows: StepRows) -> Tensor:
        """Disturb and mask float32 logits in place, after the temperature, each row by its request's settings."""
        log_kept_S = torch.zeros(len(logits_SV), device=logits_SV.device)
        kept_vocab_S = torch.zeros(len(logits_SV), dtype=torch.int32, device=logits_SV.device)
        for shared, chosen in rows.groups:
            self._keep(logits_SV, rows, shared.keep_every, chosen)
            part_SV = logits_SV if isinstance(chosen, slice) else logits_SV[chosen]
            if shared.disturbance.on_logits:
                seeds, positions = rows.seed_S[chosen].tolist(), rows.position_S[chosen].tolist()
                part_SV = disturb(part_SV, seeds, positions, shared.disturbance)
            log_kept_S[chosen], kept_vocab_S[chosen] = _mask(part_SV, shared.rule, rows.threshold_S1[chosen])
            if part_SV is not logits_SV:
                logits_SV[chosen] = part_SV
        self.steps.append((rows.request_S, rows.index_S, log_kept_S, kept_vocab_S))
        for shared, chosen in rows.groups:
            if shared.shared_noise:
                part_SV = logits_SV[chosen]
                seeds, positions = rows.seed_S[chosen].tolist(), rows.position_S[chosen].tolist()
                noise_SV = gumbel(seeds, positions, logits_SV.shape[1], device=logits_SV.device)
                token_S1 = (part_SV + noise_SV).argmax(-1, keepdim=True)
                # Only one token is left for vLLM to draw.
                logits_SV[chosen] = torch.full_like(part_SV, -torch.inf).scatter_(-1, token_S1, 0.0)
        return logits_SV

    def _keep(self, logits_SV: Tensor, rows: StepRows, every: int, chosen: Rows) -> None:
        """Keep the logits of rows at kept positions (`rollout.is_kept`)."""
        if not every:
            return
        row_K = np.arange(len(logits_SV))[chosen]
        kept_K = (rows.request_S[row_K] >= 0) & (rows.position_S[row_K] % every == rows.seed_S[row_K] % every)
        row_K = row_K[kept_K]
        # A copy on the host: the rows of a whole batch may not fit beside the engine.
        for row, logits_V in zip(row_K.tolist(), logits_SV[row_K].cpu(), strict=True):
            self.kept_logits.append((int(rows.request_S[row]), int(rows.index_S[row]), logits_V))

    def take(self) -> SafeSetRecord:
        """Everything recorded since the last call, copied to the host at once."""
        (steps, self.steps), (kept_logits, self.kept_logits) = (self.steps, []), (self.kept_logits, [])
        request = np.concatenate([step[0] for step in steps])
        ours = request >= 0
        return SafeSetRecord(
            request=request[ours],
            index=np.concatenate([step[1] for step in steps])[ours],
            log_kept=torch.cat([step[2] for step in steps]).cpu().numpy()[ours],
            kept_vocab=torch.cat([step[3] for step in steps]).cpu().numpy()[ours],
            logits=kept_logits,
        )


def decoded_alike(kinds: Sequence[SharedDecoding], kind_S: NDArray[np.int64]) -> list[tuple[SharedDecoding, Rows]]:
    """The rows of a step that are decoded alike, for `StepRows`; `kind_S` has each row's index in `kinds`."""
    present = np.unique(kind_S).tolist()
    if len(present) == 1:
        return [(kinds[present[0]], slice(None))]
    return [(kinds[kind], np.flatnonzero(kind_S == kind)) for kind in present]


def _mask(logits_SV: Tensor, rule: str, threshold_S1: Tensor) -> tuple[Tensor | float, Tensor | int]:
    """Set logits outside the safe set to −inf in place; returns log Z' and |V'_S|."""
    if rule == "full":
        return 0.0, logits_SV.shape[1]
    rows = max(1, MASKED_AT_ONCE // logits_SV.shape[1])
    parts = zip(torch.split(logits_SV, rows), torch.split(threshold_S1, rows), strict=True)
    log_kept_S, kept_vocab_S = zip(*(_mask_rows(*part, rule) for part in parts), strict=True)
    return torch.cat(log_kept_S), torch.cat(kept_vocab_S)


def _mask_rows(logits_RV: Tensor, threshold_R1: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    safe_RV = logits_RV >= logit_cut(logits_RV, rule, threshold_R1)
    log_sum_R = logits_RV.logsumexp(-1)
    logits_RV.masked_fill_(~safe_RV, -torch.inf)
    return logits_RV.logsumexp(-1) - log_sum_R, safe_RV.sum(-1, dtype=torch.int32)
