"""The loss of a padded batch, for training loops of others: from logits, tokens and a mask to a scalar and metrics."""

import torch
from torch import Tensor

from tailrl.config.arm import Clip, Correction, Vocabulary
from tailrl.objective.diagnostics import log_ratio_metrics
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import token_logprobs
from tailrl.runtime.errors import StudyError


def batch_loss(
    logits_NLV: Tensor,
    tokens_NL: Tensor,
    mask_NL: Tensor,
    logp_infer_NL: Tensor,
    advantage_N: Tensor,
    vocabulary: Vocabulary,
    correction: Correction | None = None,
    clip: Clip | None = None,
    logp_old_NL: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of N padded responses, a scalar with gradient, and the mismatch metrics of `log_ratio_metrics`.

    Packed responses need no mask: `token_logprobs`, then `surrogate`.

    Args:
        logits_NLV: floating [N, L, V], over the temperature; row (n, l) predicts token (n, l).
        tokens_NL: int64 [N, L], the sampled tokens.
        mask_NL: bool or 0 and 1 [N, L]: which are tokens of the response, not padding.
        logp_infer_NL: [N, L] nats, the sampler's log-probs of the tokens, under its own pruned distribution.
        advantage_N: [N], of each response.
        vocabulary: the safe set, such as Vocabulary(rule="min_p", rho="e-13"); Vocabulary() for none.
        correction: weights; None for none.
        clip: PPO's clipped ratio; None for the plain policy gradient.
        logp_old_NL: [N, L] nats, the trainer's log-probs before the first update on these responses; −inf outside its
            set. None at the first update.

    Raises:
        StudyError: shapes that do not fit, a mask of no token, log-probs above 0, an overflowing weight.
    """
    shape = list(tokens_NL.shape)
    others = (mask_NL, logp_infer_NL, *([] if logp_old_NL is None else [logp_old_NL]))
    given = [list(logits_NLV.shape[:-1]), *(list(x.shape) for x in others), [*advantage_N.shape, *shape[1:]]]
    if len(shape) != 2 or any(found != shape for found in given):
        raise StudyError(f"tokens are {shape}, and logits, mask, log-probs and advantages do not fit them: {given}")
    there_NL = mask_NL.bool()
    if not there_NL.any():
        raise StudyError("the mask leaves no token")
    sequence_T, infer_T = there_NL.nonzero()[:, 0], logp_infer_NL[there_NL]
    logits_TV = logits_NLV[there_NL].float()
    threshold = vocabulary.threshold(logits_TV.shape[1])
    fill = vocabulary.outside == "paper_fill"
    scored = token_logprobs(logits_TV, tokens_NL[there_NL], vocabulary.rule, threshold, fill)
    old_T = None if logp_old_NL is None else logp_old_NL[there_NL]
    result = surrogate(
        scored,
        infer_T,
        advantage_N[sequence_T],
        sequence_T,
        shape[0],
        shape[0],
        Correction() if correction is None else correction,
        clip,
        old_T,
    )
    train_T = torch.where(scored.outside_T, -torch.inf, scored.logp_T.detach()) if old_T is None else old_T
    return result.loss, log_ratio_metrics(train_T, infer_T, sequence_T, shape[0], train_T.isneginf())
