"""The updates of a step: rollouts and advantages in, clipped optimizer steps and their record out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.arm import Correction
from tailrl.config.jobs import Run
from tailrl.kernels.exact_logprobs import Scoring, exact_logprobs
from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.kernels.packing import Batch, micro_batches
from tailrl.kernels.whole_rows import whole_row_scores
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import named_weights
from tailrl.model.quantized import projections, rounded_weights
from tailrl.model.routing import Routing
from tailrl.objective.batch_rules import resolved
from tailrl.objective.corrections import normaliser
from tailrl.objective.disturbance import UNDISTURBED, computing_with, round_weights
from tailrl.objective.loss import check_loss, surrogate
from tailrl.objective.reference_kl import kl_loss
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.rollout.types import Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import NumericalError, StudyError
from tailrl.runtime.heap import give_back_freed
from tailrl.training.optimizer import average_over_kept, optimizer_step, scale_gradient
from tailrl.training.placement import as_forward, tensor_floats
from tailrl.training.routes import check_routes, flips, packed, prompt_mark
from tailrl.training.step_record import Part, StepRecord, Stopwatch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout for the trainer: with its advantage, its safe set's ln ρ, k or p, and its request's seed."""

    rollout: Rollout
    advantage: float
    threshold: float
    seed: int
    logp_ref_T: Tensor | None = None  # nats, the reference policy's log-probs of the tokens, on all of them
    age: int = 0  # how many steps the weights that sampled are behind


Scored = tuple[TokenLogprobs, Tensor | None, Tensor | None]
"""The trainer's log-probs; with centering the expected score of each token, else None; `routes.flips`, where the
sampler gave its experts, else None."""


def forward_logprobs(model: PreTrainedModel, samples: Sequence[Sample], run: Run) -> tuple[Scored, Batch]:
    """The trainer's log-probs of one packed micro-batch, on its own safe set or the sampler's."""
    device = next(model.parameters()).device
    batch, given_LPK = packed([sample.rollout for sample in samples], device)
    routing = None
    if given_LPK is not None:
        check_routes(model, given_LPK)
        routing = Routing(given_LPK if run.training.routing_replay else None)
    elif run.training.routing_replay:
        raise StudyError(f"arm {run.arm}: training.routing_replay needs the sampler's experts, which it did not give")

    def columns() -> tuple[Tensor | None, ...]:
        # Not the dataclass: before PyTorch 2.12 FSDP overlooks tensors in one, and gathers no weights for the backward.
        logprobs, centre_T = _logprobs(model, batch, samples, run, routing)
        return *(getattr(logprobs, field.name) for field in fields(logprobs)), centre_T

    # Together, since a sharded model has its head's weight whole only within its forward.
    *parts, centre_T = as_forward(model, columns)
    scored = TokenLogprobs(*cast(list[Tensor], parts)), centre_T
    return (*scored, None if routing is None or given_LPK is None else flips(routing, given_LPK, batch)), batch


def _logprobs(
    model: PreTrainedModel, batch: Batch, samples: Sequence[Sample], run: Run, routing: Routing | None
) -> tuple[TokenLogprobs, Tensor | None]:
    weight_VH = head_weight(model)
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing, routing)[batch.predict_T]
    threshold_N = torch.tensor([s.threshold for s in samples], device=weight_VH.device)
    rule = run.vocabulary.trainer_rule
    fill = run.vocabulary.outside == "paper_fill"
    threshold_T1 = threshold_N[batch.sequence_T, None]
    temperature = run.training.temperature
    if run.needs_distributions:
        logits_infer_TV = torch.from_numpy(np.concatenate([s.rollout.logits_infer_KV for s in samples]))
        rows = (hidden_TH, weight_VH, batch.targets_T, logits_infer_TV.to(device=weight_VH.device), threshold_T1)
        return whole_row_scores(*rows, temperature, run.vocabulary, run.correction)
    # The matched control scores the disturbed distribution that was sampled from, unmasked and masked.
    matched = run.disturbance.side == "both" and run.disturbance.on_logits
    if not (run.sampler.exact or matched):
        tokens = (hidden_TH, weight_VH, batch.targets_T)
        return constrained_logprobs(*tokens, rule, threshold_T1, temperature, fill), None
    # Whole rows of logits: an exact engine needs their bits, and a disturbance acts on each logit.
    scoring = Scoring(rule, temperature, fill, run.disturbance if matched else UNDISTURBED)
    where = (batch.of_tokens([s.seed for s in samples]), batch.positions())
    scored = exact_logprobs(hidden_TH.float(), weight_VH.float(), batch.targets_T, threshold_T1, scoring, *where)
    return scored, None


@torch.no_grad()
def old_logprobs(model: PreTrainedModel, samples: Sequence[Sample], run: Run) -> list[TokenLogprobs]:
    """The trainer's log-probs of every sample's tokens before the first update on them, in the samples' order."""
    old: dict[int, TokenLogprobs] = {}
    groups = _micro_batches(samples, run, range(len(samples)))
    for index, _ in distributed.dealt(len(groups)):
        (logprobs, *_), batch = _together(forward_logprobs, model, [samples[i] for i in groups[index]], run)
        old |= zip(groups[index], logprobs.split(list(batch.responses_N)), strict=True)
    whole = {place: own for given in distributed.gathered(old) for place, own in given.items()}
    return [whole[place] for place in range(len(samples))]


def accumulate_gradients(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    run: Run,
    watch: Stopwatch,
    record: StepRecord,
    old: Sequence[TokenLogprobs] | None = None,
) -> float:
    """Forward and backward over the micro-batches of one update; gradients add up in the model.

    The micro-batches are dealt to the ranks. Each adds its share of the loss, which is divided by all samples, and the
    ranks' gradients are summed. Samples with advantage 0 (under RLOO and GRPO every group that is all right or all
    wrong) add nothing to the gradient, but for a KL in the loss: they come last, scored for the record only.

    Args:
        model: the policy.
        samples: the rollouts of this update.
        run: estimator, vocabulary, correction and clip.
        watch: gets the seconds of the phases forward and backward.
        record: gets the diagnostics' data of all ranks.
        old: the trainer's log-probs of each sample's tokens before the first update on these rollouts, for the record
            and for a clip whose ratio is to them. None for a single update, where the present ones are the old ones.

    Returns:
        The loss, one mean over all samples.

    Raises:
        NumericalError: a log-prob or the loss is not finite on some rank; raised on every rank.
    """
    every = run.reference_kl is not None and run.reference_kl.where == "loss"
    teaching = [i for i, sample in enumerate(samples) if every or sample.advantage != 0]
    silent = [i for i, sample in enumerate(samples) if not (every or sample.advantage != 0)]
    if not teaching:
        # The gradient is 0, not missing: the optimizer still applies its momentum.
        teaching, silent = silent, []
    loss_sum = 0.0
    for teaches, indices in ((True, teaching), (False, silent)):
        groups = _micro_batches(samples, run, indices)
        parts: list[Part] = []
        for index, counts in distributed.dealt(len(groups)):
            give_back_freed()
            chosen = [samples[i] for i in groups[index]]
            before = None if old is None else [old[i] for i in groups[index]]
            with watch.phase("forward"), torch.set_grad_enabled(teaches):
                loss, part = _together(_forward, model, chosen, run, len(samples), before, groups[index])
            if teaches:
                with watch.phase("backward"):
                    (loss if counts else 0 * loss).backward()  # type: ignore[no-untyped-call]
            if counts:
                parts.append(part)
        with watch.phase("backward"):
            parts = distributed.in_turns(distributed.gathered(parts))
        for part in parts:
            record.add(part)
            loss_sum += part.loss.item()
    give_back_freed()
    return loss_sum


def _forward(
    model: PreTrainedModel,
    chosen: Sequence[Sample],
    run: Run,
    samples: int,
    old: Sequence[TokenLogprobs] | None,
    numbers: Sequence[int],
) -> tuple[Tensor, Part]:
    """A micro-batch's loss with gradient, its share of a mean over `samples` samples; and its record."""
    (logprobs, expected_T, flips_TL), batch = forward_logprobs(model, chosen, run)
    device = logprobs.logp_T.device
    names = ("logp_infer_T", "log_kept_infer_T", "kept_vocab_infer_T")
    recorded = (np.concatenate([getattr(s.rollout, name) for s in chosen]) for name in names)
    logp_infer_T, log_kept_infer_T, kept_vocab_infer_T = (torch.from_numpy(array).to(device) for array in recorded)
    advantage_T = torch.tensor([s.advantage for s in chosen], device=device)[batch.sequence_T]
    before = None if old is None else TokenLogprobs.joined(old)
    old_T = None
    if before is not None and run.clip is not None and run.clip.ratio != "bypass":
        old_T = before.in_set().to(device)
    infer = (logp_infer_T, advantage_T, batch.sequence_T)
    age_T = torch.tensor([s.age for s in chosen], device=device)[batch.sequence_T]
    scored = surrogate(logprobs, *infer, len(chosen), samples, run.correction, run.clip, old_T, expected_T, age_T=age_T)
    total, reference_T = scored.loss, None
    if run.reference_kl is not None:
        reference_T = torch.cat([cast(Tensor, s.logp_ref_T) for s in chosen]).to(device)
        if run.reference_kl.where == "loss":
            total = total + kl_loss(run.reference_kl, logprobs.logp_T, reference_T, logprobs.outside_T, samples)
    loss = total.detach().double()
    # A token outside the set has no term, so the loss alone would not show it.
    if not logprobs.logp_full_T.isfinite().all():
        raise NumericalError(f"the loss is {loss.item()}: the policy's log-probs are no longer finite")
    check_loss(loss)
    of_tokens = (logp_infer_T, log_kept_infer_T, kept_vocab_infer_T, batch.sequence_T, advantage_T, scored.clipped_T)
    # The record is of r_corr, at the weights that sampled: the effect of earlier updates is not a mismatch.
    numbers_N = torch.tensor(numbers)
    return total, Part(loss, before or logprobs, *of_tokens, scored.weights, numbers_N, reference_T, flips_TL)


def _together(compute: Callable[..., Result], *arguments: Any) -> Result:
    """`compute` of the arguments; raises any rank's NumericalError on all ranks, so that none waits."""
    result, fault = None, None
    try:
        result = compute(*arguments)
    except NumericalError as error:
        fault = error
    if distributed.any_rank(fault is not None):
        sentences = distributed.gathered(None if fault is None else str(fault))
        raise NumericalError(next(sentence for sentence in sentences if sentence is not None)) from fault
    return cast(Result, result)


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    run: Run,
    seed: int,
    watch: Stopwatch,
    delayed: Sequence[tuple[str, Tensor]] | None = None,
) -> tuple[float, float, StepRecord]:
    """All updates on the rollouts of one step.

    Args:
        model: the policy, changed in place.
        optimizer: its optimizer.
        samples: the step's rollouts.
        run: the arm's settings; `training.minibatches` is the number of updates.
        seed: of the rollouts' order in the minibatches.
        watch: gets the seconds of the phases.
        delayed: named weights of an earlier step, at which the gradient is taken; None for the policy's own.

    Returns:
        The mean loss and the mean gradient norm (before clipping) over the updates, and the step's record.

    Raises:
        NumericalError: a log-prob, a loss or a norm is not finite; earlier updates stay in effect.
    """
    record, losses, norms = StepRecord(), [], []
    count = run.training.minibatches
    order = np.random.default_rng(seed).permutation(len(samples)) if count > 1 else np.arange(len(samples))
    old = None
    if count > 1 or run.correction.judges_batch:
        with watch.phase("forward"), computing_at(model, run, delayed), tensor_floats(run.sampler):
            old = old_logprobs(model, samples, run)
    for part in np.array_split(order, count):
        chosen = [samples[i] for i in part]
        before = None if old is None else [old[i] for i in part]
        done = len(record.parts)
        judged = run
        if before is not None and run.correction.judges_batch:
            judged = run.model_copy(update={"correction": of_update(run.correction, chosen, before)})
        with computing_at(model, run, delayed), tensor_floats(run.sampler):
            losses.append(accumulate_gradients(model, chosen, judged, watch, record, before))
        # Numbers within this update become numbers within the step.
        record.parts[done:] = [replace(p, number_N=torch.from_numpy(part)[p.number_N]) for p in record.parts[done:]]
        if run.training.loss_mean == "kept":
            losses[-1] *= average_over_kept(model, record.of("weights.used_N", since=done))
        if run.correction.normalise:
            losses[-1] *= scale_gradient(
                model, 1 / normaliser(run.correction, record.of("weights.ratio_X", since=done))
            )
        with watch.phase("optimizer"):
            norms.append(optimizer_step(model, optimizer, run.training.max_grad_norm))
    return float(np.mean(losses)), float(np.mean(norms)), record


def of_update(correction: Correction, samples: Sequence[Sample], old: Sequence[TokenLogprobs]) -> Correction:
    """The correction with rules over the batch as limits of single tokens, which all tokens of the update give.

    `old`: the trainer's log-probs of each sample's tokens before the first update on the step's rollouts.
    """
    before = TokenLogprobs.joined(old)
    inside_T = ~before.outside_T.cpu()
    infer_T = torch.from_numpy(np.concatenate([sample.rollout.logp_infer_T for sample in samples]))[inside_T]
    delta_T = before.in_set().cpu()[inside_T] - infer_T
    return resolved(correction, delta_T, torch.zeros_like(delta_T), infer_T)


def computing_at(
    model: PreTrainedModel, run: Run, delayed: Sequence[tuple[str, Tensor]] | None
) -> AbstractContextManager[None]:
    """The model computes with the weights at which the arm takes its gradient: delayed, rounded, or its own.

    Delayed weights are those that the engine was handed: already as coarse as the disturbance makes them.
    """
    coarse = run.disturbance.weights if run.disturbance.side == "both" else None
    if delayed is None and coarse is None and not run.sampler.few_bit_trainer:
        return nullcontext()
    weights = round_weights(named_weights(model), coarse) if delayed is None else delayed
    quantized = projections(model) if run.sampler.few_bit_trainer else frozenset()
    return computing_with(model, rounded_weights(weights, quantized, run.sampler.formats))


def _micro_batches(samples: Sequence[Sample], run: Run, indices: Sequence[int]) -> list[list[int]]:
    rollouts = [samples[i].rollout for i in indices]
    lengths = [len(rollout.tokens) for rollout in rollouts]
    prompts, marks = [rollout.prompt_tokens for rollout in rollouts], list(map(prompt_mark, rollouts))
    groups = micro_batches(prompts, lengths, run.training.token_budget, marks)
    return [[indices[i] for i in group] for group in groups]
