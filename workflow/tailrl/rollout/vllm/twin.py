"""The twin of a quantised engine: the same quantisation in PyTorch (`model.quantized`), with the same log-probs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tailrl.config.sampler import FewBits
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import PACKED_ATTENTION, head_weight, hidden_states
from tailrl.model.quantized import projections, round_activations, rounded_weights
from tailrl.objective.disturbance import UNDISTURBED
from tailrl.rollout import Decoding
from tailrl.rollout.self_test import shortened
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError

if TYPE_CHECKING:
    from tailrl.rollout.vllm.engine import VllmSampler

SMALLEST = 0.01
"""Mean difference of log-probs, nats, that is always accepted. Float32 engines of random weights had 5e-3 at most: what
float32 rounds otherwise may fall on the other side of an int8 or float8 step."""

SHARE = 3.0
"""Accepted difference as a multiple of the twin's own, in the engine's dtype against float32: two computations in one
dtype round differently, and quantised activations carry each of their errors over a step."""


class TwinCheckedSampler:
    """A quantised engine whose first self-test compares it with the same quantisation in PyTorch."""

    def __init__(self, engine: "VllmSampler", policy_folder: Path, settings: FewBits) -> None:
        self.engine = engine
        self.folder, self.settings = policy_folder, settings
        self.untested = True  # neither a self-test nor a first batch has been
        # The first weights as they came, on the first rank: a whole policy each would not fit beside eight engines.
        self.handed: dict[str, Tensor] = {}

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """See `Sampler.generate`; without a self-test before it there is none."""
        self.untested, self.handed = False, {}
        return self.engine.generate(requests, decoding)

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """The engine's own self-test; before the first batch its twin's too.

        Raises:
            StudyError: as the engine's raises; or it is not its twin: see `check_twin`.
        """
        worst = self.engine.self_test(requests, decoding)
        if self.untested:
            plain = replace(shortened(decoding), rule="full", disturbance=UNDISTURBED)
            sampled = self.engine.generate(requests, plain)
            if distributed.is_first():
                check_twin(
                    self.folder, self.handed, self.settings, sampled, plain.temperature, self.engine.rounds_queries
                )
            self.untested, self.handed = False, {}
        return worst

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.load_weights`."""
        self.engine.load_weights(self._noted(weights))

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if self.untested and distributed.is_first():
                self.handed[name] = weight.cpu()
            yield name, weight

    def release(self) -> None:
        """See `Sampler.release`."""
        self.engine.release()

    def metrics(self) -> dict[str, float]:
        """See `Sampler.metrics`."""
        return self.engine.metrics()


@torch.no_grad()
def twin_logprobs(
    folder: Path,
    weights: Mapping[str, Tensor],
    settings: FewBits,
    rollouts: Sequence[Rollout],
    temperature: float,
    queries: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The twin's log-probs, nats, float32 [T], of all responses' tokens; computed in `dtype` on the CPU."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    model.load_state_dict(dict(rounded_weights(weights.items(), projections(model), settings)))
    round_activations(model.eval(), settings, queries)
    batch = pack_batch([r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts])
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    logp_TV = ((hidden_TH @ head_weight(model).T).float() / temperature).log_softmax(-1)
    return logp_TV.gather(-1, batch.targets_T[:, None]).squeeze(-1)


def check_twin(
    folder: Path,
    weights: Mapping[str, Tensor],
    settings: FewBits,
    rollouts: Sequence[Rollout],
    temperature: float,
    queries: bool = False,
) -> float:
    """Check log-probs of a quantised engine, sampled from all tokens without a disturbance, against its twin's.

    Args:
        folder: the policy's; only its configuration is read.
        weights: those that were handed to the engine, by name, before they were quantised.
        settings: of the engine.
        rollouts: what it sampled.
        temperature: divided the logits.
        queries: whether the engine's attention rounds queries too.

    Returns:
        The mean absolute difference, nats a token.

    Raises:
        StudyError: it exceeds `SMALLEST` and `SHARE` times what the engine's dtype explains: the weights are packed
            wrongly, or are those of an earlier hand-over. A format that is near to the engine's dtype, such as none at
            all instead of int8, need not be found: `quantization.check_formats` looks for it.
    """
    engine_T = torch.cat([torch.from_numpy(rollout.logp_sampler_T) for rollout in rollouts])
    given = (folder, weights, settings, rollouts, temperature, queries)
    exact_T, coarse_T = (twin_logprobs(*given, dtype) for dtype in (torch.float32, getattr(torch, settings.dtype)))
    differs, explained = ((other_T - exact_T).abs().mean().item() for other_T in (engine_T, coarse_T))
    if not differs <= max(SMALLEST, SHARE * explained):
        raise ModelError(
            "the quantised engine is not its own format: its log-probs differ from those of the same quantisation in "
            f"PyTorch by {differs:.2g} nats a token, of which rounding to {settings.dtype} explains {explained:.2g}"
        )
    return differs
