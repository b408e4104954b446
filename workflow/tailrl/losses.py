"""The objective as pure functions, for a trainer of one's own: log-probs, weights, loss, and what was left out.

Of T packed tokens of N responses:

    scored = constrained_logprobs(hidden_TH, head.weight, tokens_T, "min_p", log_rho, temperature)
    result = surrogate(scored, logp_infer_T, advantage_T, sequence_T, N, N, Correction(sequence="mis"), None)
    result.loss.backward()
    metrics = loss_metrics(scored.in_set(), scored.log_kept_T, logp_infer_T, sequence_T, result.weights)

`constrained_logprobs` is from hidden states and the head's weight, chunk by chunk, and `token_logprobs` from logits.
`correct` makes importance weights and masks alone, `surrogate` the loss of packed tokens, `batch_loss` that of a padded
batch of logits with a mask. `log_ratio_metrics` has k1, k3 and more, `ESTIMATORS` the advantages. examples/loops/ has
whole loops.
"""

from tailrl.runtime.extras import not_installed

try:
    from tailrl.config.arm import Clip, Correction
    from tailrl.config.vocabulary import Vocabulary
    from tailrl.kernels.logprobs import constrained_logprobs
    from tailrl.objective.advantages import ESTIMATORS
    from tailrl.objective.batch import batch_loss
    from tailrl.objective.corrections import Weights, correct
    from tailrl.objective.diagnostics import log_ratio_metrics, loss_metrics
    from tailrl.objective.loss import Surrogate, surrogate
    from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs
except ModuleNotFoundError as error:
    raise ImportError(not_installed(error, "tailrl.losses") or str(error)) from error

__all__ = [
    "Clip",
    "Correction",
    "ESTIMATORS",
    "Surrogate",
    "TokenLogprobs",
    "Vocabulary",
    "Weights",
    "batch_loss",
    "constrained_logprobs",
    "correct",
    "log_ratio_metrics",
    "loss_metrics",
    "safe_set",
    "surrogate",
    "token_logprobs",
]
