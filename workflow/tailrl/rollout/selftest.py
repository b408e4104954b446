"""Whether recorded log-probs are those of logits that an engine has drawn from: what every self-test compares."""

import numpy as np
import torch
from torch import Tensor

from tailrl.records import Request, Rollout
from tailrl.vocabulary import safe_set, set_size


def tolerance(vocabulary: int) -> float:
    """Nats that a float32 log-softmax over so many tokens may be off by.

    1e-5; where the vocabulary is large, one rounding for each of the additions in a lane of 16: measured were 2e-5 of
    49,152 tokens and 5e-5 of 151,936. Raw log-probs in place of processed ones are off by −log Z, 1e-4 and more.
    """
    return max(1e-5, vocabulary / 16 * 2**-24)


def record_error(request: Request, rollout: Rollout, logits_TV: Tensor, rule: str) -> float:
    """Largest difference, nats, of a rollout's log π'^mp and log Z' from a float64 log-softmax of the engine's logits.

    Args:
        request: whose response it is.
        rollout: what the engine recorded of T tokens.
        logits_TV: float32, after temperature and disturbance, before the mask. The caller has disturbed the engine's
            own anew, by the request's seed: a row that got another response's noise shows.
        rule: of the safe set.

    Returns:
        inf where |V'_S| differs, a number is none, or a token has no logits.
    """
    count = len(rollout.tokens)
    if len(logits_TV) != count:
        return np.inf
    safe_TV = safe_set(logits_TV, rule, request.threshold)
    exact_TV = logits_TV.double()
    log_sum_safe_T = exact_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1)
    chosen_T = exact_TV[torch.arange(count), list(rollout.tokens)]
    logp_error_T = (chosen_T - log_sum_safe_T).numpy() - rollout.logp_infer_T
    kept_error_T = (log_sum_safe_T - exact_TV.logsumexp(-1)).numpy() - rollout.log_kept_infer_T
    worst = float(np.abs([logp_error_T, kept_error_T]).max())
    same_sizes = bool((set_size(safe_TV, rule).numpy() == rollout.kept_vocab_infer_T).all())
    return worst if same_sizes and np.isfinite(worst) else np.inf
