"""The exact engine samples with the trainer's own model: each log-prob equals the trainer's bit for bit.

A run with it has zero mismatch (VeXact, arXiv 2605.14220). A decoding step is one row of tokens, one per sequence in
flight, through the model that the trainer runs on its packed rows. Only the attention differs, and
`kernels.batch_invariant` makes it the same. Keys and values are cached. A prompt of several requests runs once. When
sequences end, the last ones in flight move into their rows; waiting requests are admitted in groups.

Where the settings quantise, the trainer does too (`model.quantized`): a quantised engine without a mismatch.

Engine and trainer are on the GPU where there is one. The self-test decides, before a step, whether it is exact: an
H200 and an H100 were.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tailrl.config.sampler import ExactSettings
from tailrl.kernels.exact_logprobs import Scoring, head_logits
from tailrl.model.forward import check_rope, head_weight, sliding_window
from tailrl.model.quantized import check_sizes, match_engine, projections, rounded_weights
from tailrl.rollout import Decoding, self_test
from tailrl.rollout.kv_cache import Flight
from tailrl.rollout.sampling import DrawnStep, LocalSampler, draw, stop_tokens
from tailrl.rollout.types import Request
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError


class ExactSampler(LocalSampler):
    """A `Sampler` over a copy of the trainer's model in this process."""

    def __init__(self, policy_folder: Path, settings: ExactSettings, max_length: int, *_: object) -> None:
        """See `make_sampler`; the engine needs no seed of its own, nor to know of a trainer beside it."""
        config = AutoConfig.from_pretrained(policy_folder, trust_remote_code=False)
        check_rope(config, max_length)
        window = sliding_window(config)
        if window is not None and max_length > window:
            raise ModelError(
                f"{policy_folder}: its attention looks back over a sliding_window of {window} tokens; the exact engine "
                f"supports no longer sequence, and one of {max_length} may come"
            )
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
        check_sizes(self.model, settings)
        match_engine(self.model, settings)
        self.settings = settings
        self.device = distributed.device()
        self.model.eval().requires_grad_(False).to(self.device)
        self.max_length = max_length
        self.stop = torch.tensor(stop_tokens(policy_folder), device=self.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.load_weights`; rounds them where the settings quantise."""
        super().load_weights(rounded_weights(weights, projections(self.model), self.settings))

    def steps(self, requests: Sequence[Request], limits: Sequence[int], decoding: Decoding) -> Iterator[DrawnStep]:
        """See `LocalSampler.steps`; here a rollout never depends on the batch."""
        flight, weight_VH = Flight(self.model, requests, limits), head_weight(self.model)
        scoring = Scoring(decoding.rule, decoding.temperature, disturbance=decoding.disturbance)
        start_N = torch.tensor([request.start for request in requests], device=self.device)
        while flight.admit():
            step = flight.step()
            positions = (step.index_S + start_N[step.request_S]).tolist()
            logits_SV = head_logits(step.hidden_SH, weight_VH, scoring, step.seeds, positions)
            drawn = draw(logits_SV, decoding.rule, step.threshold_S1, step.seeds, positions)
            alive = slice(step.alive)
            yield DrawnStep(step.request_S[alive], step.index_S[alive], drawn.at(alive), logits_SV)
            stopped_S = torch.isin(drawn.token_S, self.stop)
            flight.advance(drawn.token_S, stopped_S | (step.index_S + 1 == step.limit_S))

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """See `self_test.self_test`."""
        return self_test.self_test(self.generate, self.model, requests, decoding)
