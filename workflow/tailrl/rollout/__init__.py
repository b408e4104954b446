"""Engines that sample. A `Sampler` turns requests into rollouts and takes new weights; nothing else.

The rest of the package knows this protocol only; `make_sampler` imports the engine that a study names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.objective.disturbance import UNDISTURBED
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import ConfigurationError, few
from tailrl.runtime.import_path import called, imported, is_import_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Decoding:
    """How responses are drawn."""

    temperature: float  # divides the logits, before everything else
    max_new_tokens: int  # longest response, tokens
    # Key of `safe_set.RULES`, for V'_S on the engine's distribution; each request brings its threshold.
    rule: str = "full"
    # Of that distribution, before V'_S is chosen (`disturbance.disturb`). The engine ignores the part about weights,
    # which are disturbed before they are handed over.
    disturbance: Disturbance = UNDISTURBED
    # Draw argmax(log π + g) with `noise.gumbel` of the response's seed and the position: engines with the same noise
    # draw the same token where they can. Rollouts then have no log-probs.
    shared_noise: bool = False
    keep_every: int = 0  # keep the logits of every n-th position of a response (`is_kept`); 0: of none


def is_kept(seed: int, position: int, every: int) -> bool:
    """Whether logits are kept at this position of the response with this seed: every n-th, the first by the seed."""
    return every > 0 and position % every == seed % every


class Sampler(Protocol):
    """A rollout engine."""

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """One rollout per request, in their order. A request's rollout depends on the batch only as far as the engine's
        arithmetic does."""

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """Largest error, nats, of `generate`'s log-probs for these requests against the distribution that the engine
        samples from; raises StudyError where the error would bias ratios."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the policy's weights by these named tensors (any dtype; the engine casts to its own)."""

    def release(self) -> None:
        """Give memory to a trainer on the same device, until the next `load_weights`; without it, there are no samples.
        An engine that has none to give goes on as it is."""

    def metrics(self) -> dict[str, float]:
        """The engine's metrics of the last batch; `tailrl.tracking.metrics` has their names."""


def make_sampler(
    settings: SamplerSettings, policy_folder: Path, max_length: int, seed: int, trainer: "PreTrainedModel | None" = None
) -> Sampler:
    """The engine that `settings` names, shaped for a policy; load its weights before it generates.

    Args:
        settings: engine and dtypes.
        policy_folder: a Hugging Face folder; only its configuration is read.
        max_length: longest prompt and response together, tokens.
        seed: the engine's own seed; each request brings another.
        trainer: the trained model, on the engine's device; it verifies the engine's draws where `settings` says so.

    Raises:
        StudyError: the engine is not installed, does not know the policy, or lacks ranks to share it.
    """
    if settings.verify:
        from tailrl.rollout.sampling import stop_tokens
        from tailrl.rollout.verified import VerifiedSampler

        if trainer is None:
            raise RuntimeError("a verified sampler needs the trainer's model")
        proposer = make_sampler(settings.model_copy(update={"verify": False}), policy_folder, max_length, seed, trainer)
        return VerifiedSampler(proposer, trainer, stop_tokens(policy_folder), max_length)
    if is_import_path(settings.engine):
        _check_methods(settings.engine)
        own: Sampler = called(settings.engine, policy_folder, settings, max_length, seed, trainer is not None)
        return own
    module, _, name = settings.PATH.partition(":")
    try:
        engine = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigurationError(
            "sampler.engine: vllm is not installed in this environment; engine: transformers samples without it"
        ) from None
    made: Sampler = engine(policy_folder, settings, max_length, seed, trainer is not None)
    return made


def _check_methods(path: str) -> None:
    """Raises StudyError where the class that an import path names lacks a method of `Sampler`."""
    engine = imported(path)
    methods = [name for name, method in vars(Sampler).items() if callable(method) and not name.startswith("_")]
    if lacking := [name for name in methods if not callable(getattr(engine, name, None))]:
        raise ConfigurationError(f"sampler.engine: {path} lacks {few(lacking)}, as tailrl.rollout.Sampler has")
