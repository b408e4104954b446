"""The objective as pure functions, for a trainer of one's own: log-probs, weights, loss, and what was left out.

Of T packed tokens of N responses:

    scored = constrained_logprobs(hidden_TH, head.weight, tokens_T, "min_p", log_rho, temperature)
    inputs = LossInputs(
        trainer=scored,
        logp_sampler_T=logp_sampler_T,
        advantage_T=advantage_T,
        sequence_T=sequence_T,
        sequences=N,
        denominator=N,
    )
    outputs = loss(inputs, correction=Correction(sequence="mis"))
    outputs.loss.backward()
    metrics = outputs.metrics

`constrained_logprobs` is from hidden states and the head's weight, chunk by chunk, and `token_logprobs` from logits.
`correct` makes importance weights and masks alone, `loss` the loss of packed tokens, and `batch_loss` that of a padded
batch of logits with a mask; `surrogate` is an older form of `loss`. `log_ratio_metrics` has k1, k3 and more,
`ESTIMATORS` the advantages. examples/loops/ has whole loops.
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
    from tailrl.objective.loss import LossInputs, LossOutputs, Surrogate, loss, surrogate
    from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs
except ModuleNotFoundError as error:
    raise ImportError(not_installed(error, "tailrl.losses") or str(error)) from error

__all__ = [
    "Clip",
    "Correction",
    "ESTIMATORS",
    "LossInputs",
    "LossOutputs",
    "Surrogate",
    "TokenLogprobs",
    "Vocabulary",
    "Weights",
    "batch_loss",
    "constrained_logprobs",
    "correct",
    "log_ratio_metrics",
    "loss",
    "loss_metrics",
    "safe_set",
    "surrogate",
    "token_logprobs",
]
