"""The loss of an arm on packed tokens: log π^mp, advantages and weights become one scalar.

    ĝ = E_{y ~ π_infer^mp}[ (π_train^mp(y) / π_infer^mp(y)) ∇ log π_train^mp(y) A ]                    (Theorem 5.3)

The advantage A stands for the paper's reward R. Training and the probe of exact gradients (`tailrl.probes.gradients`)
call the same `loss`. Each loss is a sum over tokens divided by all sequences of the step, rejected ones included:
the losses of a step's micro-batches add up to one mean.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tailrl.config.arm import Clip, Correction
from tailrl.config.reference_kl import ReferenceKL
from tailrl.objective.corrections import Weights, correct
from tailrl.objective.diagnostics import loss_metrics
from tailrl.objective.proximal import proximal_logprobs
from tailrl.objective.ratio_losses import OF_RESPONSES, RatioTokens, ratio_term
from tailrl.objective.reference_kl import kl_loss
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.objective.sequences import check_logprobs, check_packed, sequence_any, times
from tailrl.runtime.errors import DataError, NumericalError


def policy_gradient(logp_T: Tensor, advantage_T: Tensor, weight_T: Tensor, step_sequences: int) -> Tensor:
    """−(1/B) Σ_t w_t A_t log π^mp(y_t|s_t), a scalar with gradient −ĝ of Theorem 5.3 (with w = 1: naive).

    Args:
        logp_T: float32 [T] with gradient; 0 for a dropped token.
        advantage_T: float32 [T], the advantage of the token's sequence.
        weight_T: float32 [T], stop-gradient.
        step_sequences: B, all sequences sampled in the step.
    """
    return -(weight_T.detach() * advantage_T * logp_T).sum() / step_sequences


def ratio_loss(
    loss: str,
    logp_T: Tensor,
    logp_old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    clip: tuple[float, float],
    step_sequences: int,
    log_ratio_limit: float | None = None,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−(1/B) Σ_t w_t term_t, with the terms of one of `RATIO_LOSSES` on the ratio r = π_θ/π_old.

    At r = 1 it has the gradient of `policy_gradient`.

    Args:
        loss: key of `RATIO_LOSSES`, or an import path.
        logp_T: float32 [T] with gradient.
        logp_old_T: float32 [T], log π_old, stop-gradient. recompute, decoupled: the trainer's before the first update
            on these rollouts, r = r_train. bypass: the sampler's, r = r_rollout (arXiv 2605.14220).
        advantage_T: float32 [T].
        weight_T: float32 [T], stop-gradient; decoupled: times r_corr = π_train_old/π_rollout_old.
        sequence_T: int64 [T], each token's sequence.
        sequences: N.
        clip: (low, high).
        step_sequences: B.
        log_ratio_limit: nats, to which log r is clamped; None: it is not.
        dual: bound of r where A < 0, of `ppo` alone; None: no bound.

    Returns:
        A scalar with gradient, and bool [T]: where the clip acts. The scalar is infinite where a term that counts is.
    """
    # A weight may be infinite where the advantage is 0, and then counts nothing.
    live_T = (weight_T != 0) & (advantage_T != 0)
    weight_T = weight_T.detach().masked_fill(~live_T, 0.0)
    ratio_T = logp_T - logp_old_T.detach()
    tokens = RatioTokens(logp_T, ratio_T, advantage_T, sequence_T, sequences, clip, log_ratio_limit, live_T, dual)
    term_T, clipped_T = ratio_term(loss, tokens)
    return -(weight_T * term_T).sum() / step_sequences, clipped_T


def log_ratio_term(
    correction: Correction, logp_T: Tensor, logp_sampler_T: Tensor, outside_T: Tensor, step_sequences: int
) -> Tensor:
    """(1/B) c Σ_t (log π_θ − log π_infer)², a scalar with gradient: IPO's term, on dropped tokens too.

    As `ipo_loss_fn` of PrimeIntellect-ai/prime-rl (559b44772) has it, and Kimi K2.5 (arXiv 2602.02276). A token outside
    the trainer's set has no ratio, and adds nothing.
    """
    if correction.log_ratio_penalty is None:
        return logp_T.new_zeros(())
    log_ratio_T = (logp_T - logp_sampler_T).masked_fill(outside_T, 0.0)
    return correction.log_ratio_penalty * log_ratio_T.square().sum() / step_sequences


def check_loss(loss: Tensor) -> None:
    """Raises NumericalError where a loss is not finite, although the log-probs are."""
    if not loss.isfinite():
        raise NumericalError(f"the loss is {loss.item()}: the log-probs are finite, but a ratio or an advantage is not")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """T packed tokens of N sequences: both sides' log-probs, the advantages, and the denominator of the loss."""

    trainer: TokenLogprobs  # at the present weights, with gradient
    logp_sampler_T: Tensor  # [T] nats, the sampler's log π'^mp of the same tokens
    advantage_T: Tensor  # [T], the advantage of the token's sequence
    sequence_T: Tensor  # int64 [T], each token's sequence, 0 to N − 1
    sequences: int  # N, in this micro-batch
    denominator: int  # B, sequences in the whole step: the losses of its micro-batches add up to one mean
    # [T] nats, log π_train_old^mp, from before the first update on these rollouts; −inf outside V_S. None at the first
    # update, where the present log-probs are the old ones.
    logp_old_T: Tensor | None = None
    expected_T: Tensor | None = None  # [T] with gradient, `centering.expected_score`; None without centering
    logp_reference_T: Tensor | None = None  # [T] nats, the reference policy's on all tokens; None without one
    segment_T: Tensor | None = None  # int64 [T], for rejections by segment; None: a response is one segment
    age_T: Tensor | None = None  # [T], how many versions the sampler's weights are behind, which A-3PO's clip needs

    def before(self) -> Tensor:
        """log π^mp before the first update, [T] nats without gradient; −inf outside V_S, present or old."""
        if self.logp_old_T is None:
            return self.trainer.in_set()
        return self.logp_old_T.masked_fill(self.trainer.outside_T, -torch.inf)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The loss, a scalar with gradient, and what it was made of."""

    loss: Tensor
    weights: Weights
    clipped_T: Tensor  # bool [T], where the clipped branch is taken
    inputs: LossInputs = field(repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """What the loss was made of and what it left out: `diagnostics.loss_metrics`."""
        inputs = self.inputs
        return loss_metrics(
            inputs.before(), inputs.trainer.log_kept_T, inputs.logp_sampler_T, inputs.sequence_T, self.weights
        )


def loss(
    inputs: LossInputs,
    *,
    correction: Correction | None = None,
    clip: Clip | None = None,
    reference_kl: ReferenceKL | None = None,
) -> LossOutputs:
    """One micro-batch's share of the step's loss: Δ, then weights, then `policy_gradient` or `ratio_loss`.

    Args:
        inputs: both sides' log-probs of the tokens, and their advantages.
        correction: the weights; None for weights of 1.
        clip: PPO's clipped ratio, or what replaces it; None for the plain policy gradient.
        reference_kl: adds a KL from the reference policy, where it is of the loss; None: there is none.

    Raises:
        StudyError: not one entry a token, no expected score for centering, no age for A-3PO, no log-probs of the
            reference, or the sampler's log-probs are above 0.
        NumericalError: a log-prob of the sampler is not finite, one from before the first update is NaN, a weight
            overflows (`correct`), or the loss does.
    """
    correction = Correction() if correction is None else correction
    trainer, sequence_T, sequences = inputs.trainer, inputs.sequence_T, inputs.sequences
    logp_T, logp_sampler_T, advantage_T = trainer.logp_T, inputs.logp_sampler_T, inputs.advantage_T
    check_packed(sequences, sequence_T, logp_T=logp_T, logp_sampler_T=logp_sampler_T, advantage_T=advantage_T)
    check_logprobs(logp_sampler_T)
    if not logp_sampler_T.isfinite().all():
        raise NumericalError("a log-prob of the sampler is not finite")
    if clip is not None and clip.proximal == "loglinear":
        logp_old_T = proximal_logprobs(logp_T.detach(), logp_sampler_T, inputs.age_T)
    else:
        logp_old_T = logp_T.detach() if inputs.logp_old_T is None else inputs.logp_old_T
    outside_T = trainer.outside_T | logp_old_T.isneginf()
    logp_old_T = logp_old_T.masked_fill(outside_T, 0.0)
    if logp_old_T.isnan().any():  # a rule that keeps a range would drop it without a word
        raise NumericalError("a log-prob of the trainer before the first update is NaN")
    delta_T = logp_old_T - logp_sampler_T
    weights = correct(
        delta_T,
        outside_T,
        sequence_T,
        sequences,
        correction,
        logp_T.detach() - logp_old_T,
        logp_sampler_T,
        advantage_T.to(delta_T.dtype),
        inputs.segment_T,
    )
    if (correction.centering == "none") != (inputs.expected_T is None):
        raise DataError("correction.centering needs the sampler's whole distribution at every token")
    clipped_T = torch.zeros_like(outside_T)
    if clip is None:
        value = policy_gradient(logp_T, advantage_T, weights.weight_T, inputs.denominator)
        if inputs.expected_T is not None:
            centre = policy_gradient(inputs.expected_T, advantage_T, weights.sequence_N[sequence_T], inputs.denominator)
            value = value - centre
    else:
        # A token outside V_S has ratio 0 under each ratio: no term, no gradient.
        weight_T = weights.weight_T.masked_fill(outside_T, 0.0)
        if clip.ratio == "decoupled":
            weight_T = times(weight_T, delta_T.exp())
        if clip.loss in OF_RESPONSES:
            weight_T = weight_T.masked_fill(sequence_any(outside_T, sequence_T, sequences)[sequence_T], 0.0)
        value, clipped_T = ratio_loss(
            clip.loss,
            logp_T=logp_T,
            logp_old_T=logp_sampler_T if clip.ratio == "bypass" else logp_old_T,
            advantage_T=advantage_T,
            weight_T=weight_T,
            sequence_T=sequence_T,
            sequences=sequences,
            clip=clip.bounds,
            step_sequences=inputs.denominator,
            log_ratio_limit=clip.limit,
            dual=clip.dual_bound,
        )
        clipped_T = clipped_T & ~outside_T
    value = value + log_ratio_term(correction, logp_T, logp_sampler_T, outside_T, inputs.denominator)
    if reference_kl is not None and reference_kl.where == "loss":
        if inputs.logp_reference_T is None:
            raise DataError("reference_kl needs the reference policy's log-probs of every token")
        value = value + kl_loss(reference_kl, logp_T, inputs.logp_reference_T, trainer.outside_T, inputs.denominator)
    check_loss(value)
    return LossOutputs(value, weights, clipped_T, inputs)


Surrogate = LossOutputs  # an older name


def surrogate(
    logprobs: TokenLogprobs,
    logp_infer_T: Tensor,
    advantage_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    step_sequences: int,
    correction: Correction,
    clip: Clip | None,
    logp_old_T: Tensor | None = None,
    expected_T: Tensor | None = None,
    segment_T: Tensor | None = None,
    age_T: Tensor | None = None,
) -> LossOutputs:
    """`loss` by its older name, with the fields of `LossInputs` one by one."""
    inputs = LossInputs(
        trainer=logprobs,
        logp_sampler_T=logp_infer_T,
        advantage_T=advantage_T,
        sequence_T=sequence_T,
        sequences=sequences,
        denominator=step_sequences,
        logp_old_T=logp_old_T,
        expected_T=expected_T,
        segment_T=segment_T,
        age_T=age_T,
    )
    return loss(inputs, correction=correction, clip=clip)
