"""An engine's input and output: requests and rollouts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailrl.runtime.older_names import accepts_older_names

Routes = NDArray[np.unsignedinteger[Any]]
"""Experts: uint8, or uint16 where a layer has more than 256."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample."""

    prompt_tokens: tuple[int, ...]  # token ids
    seed: int  # of the response's own random stream
    threshold: float = 0.0  # the safe set's ln ρ, k or p for this response
    start: int = 0  # position in the response of the first token to sample; those before it end `prompt_tokens`


OLDER_NAMES = {
    "logp_infer_T": "logp_sampler_T",
    "log_kept_infer_T": "log_kept_sampler_T",
    "kept_vocab_infer_T": "kept_vocab_sampler_T",
    "logits_infer_KV": "logits_sampler_KV",
}  # of a rollout's columns, which an engine of a user's may say


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response."""

    prompt_tokens: tuple[int, ...]  # the prompt, token ids
    tokens: tuple[int, ...]  # the response, T token ids, with the end token where it was sampled
    # float32, nats: log π'^mp of each sampled token, under the *masked, renormalised* distribution that it was drawn
    # from. The unmasked log π_infer is `logp_sampler_T + log_kept_sampler_T`.
    logp_sampler_T: NDArray[np.float32]
    log_kept_sampler_T: NDArray[np.float32]  # float32, nats: log Z', the mass of the engine's safe set
    kept_vocab_sampler_T: NDArray[np.int32]  # int32: |V'_S|, tokens in the engine's safe set
    stopped: bool  # whether the response ended with the end token (False: cut at the length limit)
    # float32 [V] for each kept position (`rollout.is_kept`), in order: the logits that its token was drawn from, after
    # temperature and disturbance, before any mask. Empty without kept positions.
    logits_sampler_KV: tuple[NDArray[np.float32], ...] = ()
    # [P, L, K]: the K experts of each of L layers for the P tokens that the engine
    # ran, prompt first; the response's last token is not run. None where the engine does not say.
    routes_PLK: Routes | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in OLDER_NAMES:
                return getattr(self, OLDER_NAMES[name])
            raise AttributeError(f"{type(self).__name__} has no {name}")


Rollout.__init__ = accepts_older_names(**OLDER_NAMES)(Rollout.__init__)  # type: ignore[method-assign]
