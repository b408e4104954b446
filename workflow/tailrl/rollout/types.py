"""What an engine is asked for and what it returns. Shapes are in the names: T response tokens, N sequences."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample.

    Attributes:
        prompt_tokens: token ids.
        seed: of the response's own random stream.
        threshold: the number of the safe set's rule for this response (ln ρ, k or p).
        start: tokens of the response that are there already, at the end of `prompt_tokens`: the first one to be
            sampled stands at this place of the response.
    """

    prompt_tokens: tuple[int, ...]
    seed: int
    threshold: float = 0.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the sampling engine did for one request.

    Attributes:
        prompt_tokens: the prompt, token ids.
        tokens: the response, token ids, T of them, with the end token where one was sampled.
        logp_infer_T: float32, nats: log π'^mp of each sampled token under the *masked, renormalised*
            distribution it was drawn from. The unmasked log π_infer is `logp_infer_T + log_kept_infer_T`.
        log_kept_infer_T: float32, nats: log Z', the engine's probability mass inside its safe set.
        kept_vocab_infer_T: int32: |V'_S|, the number of tokens in the engine's safe set.
        stopped: whether the response ended with the end token (False: cut at the length limit).
        logits_infer_KV: float32 [V] for each kept place (`rollout.is_kept`), in order: the logits that its token was
            drawn from, after temperature and disturbance, before any mask. None where no place is to be kept.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logp_infer_T: NDArray[np.float32]
    log_kept_infer_T: NDArray[np.float32]
    kept_vocab_infer_T: NDArray[np.int32]
    stopped: bool
    logits_infer_KV: tuple[NDArray[np.float32], ...] = ()
