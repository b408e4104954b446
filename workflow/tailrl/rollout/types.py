"""An engine's input and output: requests and rollouts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample.

    Attributes:
        prompt_tokens: token ids.
        seed: of the response's own random stream.
        threshold: the safe set's ln ρ, k or p for this response.
        start: position in the response of the first token to sample; the tokens before it end `prompt_tokens`.
    """

    prompt_tokens: tuple[int, ...]
    seed: int
    threshold: float = 0.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response.

    Attributes:
        prompt_tokens: the prompt, token ids.
        tokens: the response, T token ids, with the end token where it was sampled.
        logp_infer_T: float32, nats: log π'^mp of each sampled token, under the *masked, renormalised* distribution that
            it was drawn from. The unmasked log π_infer is `logp_infer_T + log_kept_infer_T`.
        log_kept_infer_T: float32, nats: log Z', the mass of the engine's safe set.
        kept_vocab_infer_T: int32: |V'_S|, tokens in the engine's safe set.
        stopped: whether the response ended with the end token (False: cut at the length limit).
        logits_infer_KV: float32 [V] for each kept position (`rollout.is_kept`), in order: the logits that its token was
            drawn from, after temperature and disturbance, before any mask. Empty without kept positions.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logp_infer_T: NDArray[np.float32]
    log_kept_infer_T: NDArray[np.float32]
    kept_vocab_infer_T: NDArray[np.int32]
    stopped: bool
    logits_infer_KV: tuple[NDArray[np.float32], ...] = ()
