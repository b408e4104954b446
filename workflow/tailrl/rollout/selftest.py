"""Whether recorded log-probs are those of logits that an engine has drawn from: what every self-test compares."""

import numpy as np
import torch
from torch import Tensor

from tailrl.disturbance import disturb
from tailrl.records import Request, Rollout
from tailrl.rollout import Decoding
from tailrl.vocabulary import logit_cut


def record_error(request: Request, rollout: Rollout, logits_TV: Tensor, decoding: Decoding) -> float:
    """Largest difference, nats, of a rollout's log π'^mp and log Z' from a float64 log-softmax of the engine's logits.

    The logits are disturbed here anew, by the request's seed: a row that got another response's noise would show.

    Args:
        request: whose response it is.
        rollout: what the engine recorded of T tokens.
        logits_TV: float32, after the temperature, before disturbance and mask.
        decoding: what was sampled with.

    Returns:
        inf where |V'_S| differs or a number is none.
    """
    count = len(rollout.tokens)
    places = range(request.start, request.start + count)
    disturbed_TV = disturb(logits_TV, [request.seed] * count, places, decoding.disturbance)
    safe_TV = disturbed_TV >= logit_cut(disturbed_TV, decoding.rule, request.threshold)
    exact_TV = disturbed_TV.double()
    log_sum_safe_T = exact_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1)
    chosen_T = exact_TV[torch.arange(count), list(rollout.tokens)]
    logp_error_T = (chosen_T - log_sum_safe_T).numpy() - rollout.logp_infer_T
    kept_error_T = (log_sum_safe_T - exact_TV.logsumexp(-1)).numpy() - rollout.log_kept_infer_T
    worst = float(np.abs([logp_error_T, kept_error_T]).max())
    same_sizes = bool((safe_TV.sum(-1).numpy() == rollout.kept_vocab_infer_T).all())
    return worst if same_sizes and np.isfinite(worst) else np.inf
