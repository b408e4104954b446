"""Engines that sample. A sampler turns requests into rollouts and takes new weights; nothing else.

The rest of the package knows the protocol only; `make_sampler` imports the engine that a study names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.objective.disturbance import UNDISTURBED
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import StudyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Decoding:
    """How responses are drawn.

    Attributes:
        temperature: divides the logits, before everything else.
        max_new_tokens: longest response, tokens.
        rule: of the safe set on the engine's own distribution (`vocabulary.RULES`); its number comes with each request.
        disturbance: of that distribution, before its safe set is chosen (`disturbance.disturb`); what it says of
            weights is not the engine's business, which has the weights that it was handed.
        shared_noise: draw argmax(log π + g) with the Gumbel noise of `noise.gumbel`, by the response's seed and the
            token's place: another engine on the same noise draws the same token where it can. No log-probs then.
        keep_every: keep the logits of one place of a response in so many (`is_kept`); 0: of none.
    """

    temperature: float
    max_new_tokens: int
    rule: str = "full"
    disturbance: Disturbance = UNDISTURBED
    shared_noise: bool = False
    keep_every: int = 0


def is_kept(seed: int, place: int, every: int) -> bool:
    """Whether the logits at this place of the response with this seed are kept: every n-th, the first by the seed."""
    return every > 0 and place % every == seed % every


class Sampler(Protocol):
    """A rollout engine."""

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """One rollout per request, in their order. The same request gives the same rollout whatever else
        is in the batch, as far as the engine's arithmetic does not depend on the batch."""
        ...

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """Largest difference, nats, between the log-probs that `generate` returns and those of the distribution that
        the engine samples from, both for these requests; raises StudyError where ratios would be biased by it."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the policy by these named tensors (any dtype; the engine casts to its own)."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the engine says of the last batch, by the names in `tailrl.tracking.metrics`."""
        ...


def make_sampler(
    settings: SamplerSettings, policy_folder: Path, max_length: int, seed: int, trainer: "PreTrainedModel | None" = None
) -> Sampler:
    """The engine that `settings` names, shaped for a policy; hand it the weights before it generates.

    Args:
        settings: engine and dtypes.
        policy_folder: a Hugging Face folder, of which the configuration alone is read.
        max_length: longest prompt and response together, tokens.
        seed: the engine's own seed; each request's random stream has its own.
        trainer: the model that is trained, where it is to verify what the engine draws.

    Raises:
        StudyError: the engine is not installed, does not know the policy, or lacks ranks that are to share it.
    """
    if settings.verify:
        from tailrl.rollout.sampling import stop_tokens
        from tailrl.rollout.verified import VerifiedSampler

        if trainer is None:
            raise RuntimeError("a verified sampler needs the trainer's model")
        proposer = make_sampler(settings.model_copy(update={"verify": False}), policy_folder, max_length, seed)
        return VerifiedSampler(proposer, trainer, stop_tokens(policy_folder), max_length)
    if settings.engine == "exact":
        from tailrl.rollout.exact import ExactSampler

        return ExactSampler(policy_folder, settings.dtype, max_length)
    if settings.engine == "transformers":
        from tailrl.rollout.transformers import TransformersSampler

        return TransformersSampler(policy_folder, settings.dtype, max_length)
    try:
        from tailrl.rollout.vllm.engine import VllmSampler
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise StudyError(
            "sampler.engine: vllm is not installed in this environment; engine: transformers samples without it"
        ) from None
    return VllmSampler(policy_folder, settings, max_length, seed)
