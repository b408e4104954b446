"""The loss of a padded batch, for training loops of others: from logits, tokens and a mask to a scalar and metrics."""

from torch import Tensor

from tailrl.config.arm import Clip, Correction
from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.corrections import normaliser
from tailrl.objective.diagnostics import log_ratio_metrics
from tailrl.objective.loss import LossInputs, loss
from tailrl.objective.safe_set import at_least_float32, token_logprobs
from tailrl.runtime.errors import ConfigurationError, DataError
from tailrl.runtime.older_names import accepts_older_names


@accepts_older_names(logp_infer_NL="logp_sampler_NL")
def batch_loss(
    logits_NLV: Tensor,
    tokens_NL: Tensor,
    mask_NL: Tensor,
    logp_sampler_NL: Tensor,
    advantage_N: Tensor,
    vocabulary: Vocabulary,
    correction: Correction | None = None,
    clip: Clip | None = None,
    logp_old_NL: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of N padded responses, a scalar with gradient, and the mismatch metrics of `log_ratio_metrics`.

    Packed responses need no mask: `token_logprobs`, then `loss`.

    Args:
        logits_NLV: floating [N, L, V], over the temperature; row (n, l) predicts token (n, l). −inf masks a token.
        tokens_NL: int64 [N, L], the sampled tokens.
        mask_NL: bool or 0 and 1 [N, L]: which are tokens of the response, not padding.
        logp_sampler_NL: [N, L] nats, the sampler's log-probs of the tokens, under its own pruned distribution.
        advantage_N: [N], of each response.
        vocabulary: the safe set, such as Vocabulary(rule="min_p", rho="e-13"); Vocabulary() for none.
        correction: weights; None for none.
        clip: PPO's clipped ratio; None for the plain policy gradient.
        logp_old_NL: [N, L] nats, the trainer's log-probs before the first update on these responses; −inf outside its
            set. None at the first update.

    Raises:
        StudyError: shapes that do not fit, a mask of no token, a token that is not there, log-probs above 0 or not
            finite.
        NumericalError: a logit of a response is NaN or +inf, or a kept token's weight or the loss is not finite.
    """
    _check(logits_NLV, tokens_NL, mask_NL, logp_sampler_NL, advantage_N, vocabulary, logp_old_NL)
    count = len(tokens_NL)
    there_NL = mask_NL.bool()
    if not there_NL.any():
        raise DataError("the mask leaves no token")
    sequence_T, sampler_T = there_NL.nonzero()[:, 0], logp_sampler_NL[there_NL]
    if not sampler_T.isfinite().all():
        raise DataError("logp_sampler_NL holds NaN or Inf among the tokens of the responses")
    logits_TV = at_least_float32(logits_NLV[there_NL])
    threshold = vocabulary.threshold(logits_TV.shape[1])
    fill = vocabulary.outside == "paper_fill"
    scored = token_logprobs(logits_TV, tokens_NL[there_NL], vocabulary.rule, threshold, fill)
    correction = correction or Correction()
    inputs = LossInputs(
        trainer=scored,
        logp_sampler_T=sampler_T,
        advantage_T=advantage_N[sequence_T],
        sequence_T=sequence_T,
        sequences=count,
        denominator=count,
        logp_old_T=None if logp_old_NL is None else logp_old_NL[there_NL],
    )
    outputs = loss(inputs, correction=correction, clip=clip)
    trainer_T = scored.in_set() if inputs.logp_old_T is None else inputs.logp_old_T
    value = outputs.loss / normaliser(correction, outputs.weights.ratio_X)
    return value, log_ratio_metrics(trainer_T, sampler_T, sequence_T, count, trainer_T.isneginf())


def _check(
    logits_NLV: Tensor,
    tokens_NL: Tensor,
    mask_NL: Tensor,
    logp_sampler_NL: Tensor,
    advantage_N: Tensor,
    vocabulary: Vocabulary,
    logp_old_NL: Tensor | None,
) -> None:
    if not isinstance(vocabulary, Vocabulary):
        raise ConfigurationError(f'vocabulary: needs Vocabulary(rule="min_p", ...), not {vocabulary!r}')
    size = list(tokens_NL.shape)
    fitting = {
        "logits_NLV": (logits_NLV, [*size, *logits_NLV.shape[-1:]]),
        "mask_NL": (mask_NL, size),
        "logp_sampler_NL": (logp_sampler_NL, size),
        "advantage_N": (advantage_N, size[:1]),
        "logp_old_NL": (logp_sampler_NL if logp_old_NL is None else logp_old_NL, size),
    }
    wrong = [
        f"{name} is {list(x.shape)}, not {shape}" for name, (x, shape) in fitting.items() if list(x.shape) != shape
    ]
    if len(size) != 2 or wrong:
        whole = f"tokens_NL is {size}" + (", not [N, L]" if len(size) != 2 else "")
        raise DataError("; ".join([whole, *wrong]))
    if not ((mask_NL == 0) | (mask_NL == 1)).all():
        raise DataError("the mask must be bool, or 0 and 1")
