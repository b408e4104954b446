"""Rules of a correction that look at all tokens of an update, as rules of single tokens.

M2PO drops the largest (log r)² until the mean over the update's other tokens is small enough (arXiv 2510.01161). Which
tokens these are depends on all of them, and training works in micro-batches. So an update's tokens are scored first;
what a rule `by: batch` finds there is a limit of single tokens, which each micro-batch can apply.
"""

import torch
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.objective.rejections import largest_kept, rule_values


@torch.no_grad()
def resolved(
    correction: Correction,
    delta_T: Tensor,
    moved_T: Tensor,
    logp_sampler_T: Tensor,
    share_T: Tensor | None = None,
) -> Correction:
    """The correction with each rule `by: batch` as a rule `by: token` at the limit that these tokens give.

    Args:
        correction: its other settings stay.
        delta_T: [T], log r_corr of every token of the update inside the trainer's set.
        moved_T: [T], log r_ppo.
        logp_sampler_T: [T] nats, the sampler's log-probs.
        share_T: [T], how often each token occurs; None: once. The exact gradients' probe gives chances here.
    """
    rules = []
    for rule in correction.reject:
        if rule.by == "batch":
            value_T = rule_values(rule, delta_T, moved_T, logp_sampler_T, correction.log_ratio_limit)
            limit = largest_kept(value_T, rule.above or 0.0, share_T)
            rule = rule.model_copy(update={"by": "token", "above": limit})
        rules.append(rule)
    return correction.model_copy(update={"reject": tuple(rules)})
