"""The logits processor for vLLM's Model Runner V2, which GPUs have: called before the temperature.

The engine therefore asks vLLM for a temperature of 1, and the processor divides by the true one. Each request has a
slot, and each step says which slot a row belongs to. All that decides about rows is known on the host, so that no step
waits for the device, but for the largest k of top-k.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from tailrl.rollout.vllm.recorder import RequestArguments, SafeSetRecorder, SharedDecoding, StepRows, decoded_alike


class SafeSetProcessorV2(SafeSetRecorder, LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    """The recorder, which follows the slots of Model Runner V2."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:  # noqa: ARG002
        super().__init__()
        slots = req_states.max_num_reqs
        self.states = req_states
        # By slot. A slot with request −1 has a request of vLLM's own, from its warm-up, which stays as it is.
        self.request, self.seed, self.start, self.kind = np.full((4, slots), -1)
        self.kinds: list[SharedDecoding] = []
        self.threshold, self.temperature = (UvaBackedTensor(slots, torch.float32) for _ in range(2))

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Fill the request's slot; returns whether the request is ours."""
        given = RequestArguments(**(sampling_params.extra_args or {}))
        shared = given.shared()
        if shared not in self.kinds:
            self.kinds.append(shared)
        self.request[req_idx], self.seed[req_idx], self.start[req_idx] = given.request, given.seed, given.start
        self.kind[req_idx] = self.kinds.index(shared)
        self.threshold.np[req_idx], self.temperature.np[req_idx] = given.threshold, given.temperature
        return given.request >= 0

    def apply_staged_writes(self) -> None:
        """Hand the device what `add_request` wrote."""
        self.threshold.copy_to_uva()
        self.temperature.copy_to_uva()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Divide float32 logits [rows, V] by the temperature, then disturb and mask them, in place.

        Raises:
            RuntimeError: a request has several rows, as in speculative decoding: the record would be wrong.
        """
        slot_S = ctx.idx_mapping_np
        if len(slot_S) != len(logits):
            raise RuntimeError(f"{len(slot_S)} requests have {len(logits)} rows of logits: one each was expected")
        slots_S = ctx.expanded_idx_mapping
        if (self.temperature.np[slot_S] != 1).any():
            logits.div_(self.temperature.gpu[slots_S][:, None])
        # The host's count of a request's tokens is exact without speculative decoding.
        length_S = ctx.seq_lens_upper_bound_np[: len(slot_S)].astype(np.int64)
        index_S = length_S - self.states.prompt_len.np[slot_S]
        # A piece of a prompt, or of a preempted request's tokens, has a row whose token is thrown away.
        sampled_S = length_S >= self.states.prefill_len.np[slot_S]
        return self.constrain(
            logits,
            StepRows(
                request_S=np.where(sampled_S, self.request[slot_S], -1),
                index_S=index_S,
                seed_S=self.seed[slot_S],
                position_S=self.start[slot_S] + np.maximum(index_S, 0),
                threshold_S1=self.threshold.gpu[slots_S][:, None],
                groups=decoded_alike(self.kinds, self.kind[slot_S]),
            ),
        )
