"""One update: rollouts and their advantages in, one clipped optimizer step and its metrics out."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.disturbance import UNDISTURBED, computing_with, round_weights
from tailrl.errors import NumericalError
from tailrl.logprobs import constrained_logprobs
from tailrl.mismatch import advantage_skew, log_ratio_metrics, weight_metrics
from tailrl.objective.corrections import Weights, sequence_sum
from tailrl.objective.surrogate import surrogate
from tailrl.operators import Scoring, exact_logprobs
from tailrl.packing import Batch, micro_batches, pack_batch
from tailrl.policy import head_weight, hidden_states, named_weights
from tailrl.records import Rollout
from tailrl.settings import Run
from tailrl.training.optimizer import optimizer_step
from tailrl.vocabulary import TokenLogprobs


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each named phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase; time within it that another phase takes is not subtracted."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(slots=True)
class StepRecord:
    """What the micro-batches of a step leave behind for the diagnostics: one list entry a micro-batch.

    Sequences are renumbered over the whole step, in the order in which they were trained on.
    """

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logp_infer: list[Tensor] = field(default_factory=list)
    log_kept_infer: list[Tensor] = field(default_factory=list)
    kept_vocab_infer: list[Tensor] = field(default_factory=list)
    sequence: list[Tensor] = field(default_factory=list)
    advantage: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    sequences: int = 0

    def tokens(self) -> dict[str, NDArray[np.generic]]:
        """Per-token arrays of the step, nats: what the figure of Δ by token probability is made from."""
        logp_infer_T = torch.cat(self.logp_infer)
        return {
            "logp_train": self._unmasked().cpu().numpy(),
            "logp_infer": (logp_infer_T + torch.cat(self.log_kept_infer)).cpu().numpy(),
            "logp_train_masked": _joined(self.logprobs, "logp_T").detach().cpu().numpy(),
            "logp_infer_masked": logp_infer_T.cpu().numpy(),
            "outside": _joined(self.logprobs, "outside_T").cpu().numpy(),
        }

    def _unmasked(self) -> Tensor:
        """The trainer's log π of every token, summed as the sampler's is, log π^mp + log Z, where it lies in the set:
        equal parts then give equal sums."""
        names = ("logp_T", "log_kept_T", "logp_full_T", "outside_T")
        logp_T, log_kept_T, full_T, outside_T = (_joined(self.logprobs, name).detach() for name in names)
        return torch.where(outside_T, full_T, logp_T + log_kept_T)

    def lost_mass_per_response(self) -> float:
        """Mean over responses of Σ_t (1 − Z_t) in the trainer: Prop. 5.5's bound on the bias, per unit of reward."""
        lost_T = -_joined(self.logprobs, "log_kept_T").expm1()
        return sequence_sum(lost_T, torch.cat(self.sequence), self.sequences).mean().item()

    def bias_bounds(self) -> dict[str, float]:
        """Prop. 5.5 per unit of reward: the paper's bound, and the total variation between the full policy and the
        constrained one, E[1 − Π_t Z_t], which it bounds."""
        log_kept_T, sequence_T = _joined(self.logprobs, "log_kept_T").double(), torch.cat(self.sequence)
        longest = sequence_T.bincount().max()
        return {
            "dvp/bias_bound_paper": (longest * -log_kept_T.min().expm1()).item(),
            "dvp/total_variation": _mean(-sequence_sum(log_kept_T, sequence_T, self.sequences).expm1()),
        }

    def metrics(self) -> dict[str, float]:
        """The step's mismatch, weights and vocabulary; the names are in `tailrl.metrics`."""
        logp_T, outside_T = _joined(self.logprobs, "logp_T").detach(), _joined(self.logprobs, "outside_T")
        logp_infer_T, log_kept_infer_T = torch.cat(self.logp_infer), torch.cat(self.log_kept_infer)
        unmasked_infer_T = logp_infer_T + log_kept_infer_T
        sequence_T, inside_T = torch.cat(self.sequence), ~outside_T
        masked = (logp_T[inside_T], logp_infer_T[inside_T])
        full_T = self._unmasked()
        mass_T = _joined(self.logprobs, "log_kept_T").exp()
        groups = {
            "rollout_corr": log_ratio_metrics(
                logp_T.masked_fill(outside_T, -torch.inf), logp_infer_T, sequence_T, self.sequences, outside_T
            )
            | advantage_skew(*masked, torch.cat(self.advantage)[inside_T])
            | weight_metrics(_joined(self.weights, "used_N")),
            "rollout_corr_unmasked": log_ratio_metrics(full_T, unmasked_infer_T, sequence_T, self.sequences, outside_T),
            "rollout_corr_raw": weight_metrics(_joined(self.weights, "raw_N")),
        }
        return {
            **{f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()},
            "policy/entropy": _mean(_joined(self.logprobs, "entropy_T")),
            "policy/clip_fraction": _mean(torch.cat(self.clipped)),
            "rollout_corr/rollout_rs_masked_fraction": _mean(_joined(self.weights, "masked_T")),
            "rollout_corr/rollout_rs_seq_masked_fraction": _mean(_joined(self.weights, "rejected_N")),
            "rollout_corr/veto_seq_fraction": _mean(_joined(self.weights, "vetoed_N")),
            "dvp/kept_mass_train_mean": _mean(mass_T),
            "dvp/kept_mass_train_min": mass_T.min().item(),
            "dvp/kept_mass_rollout_mean": _mean(log_kept_infer_T.exp()),
            "dvp/kept_mass_rollout_min": log_kept_infer_T.exp().min().item(),
            "dvp/lost_mass_per_response": self.lost_mass_per_response(),
            **self.bias_bounds(),
            "dvp/kept_vocab_per_token_train": _mean(_joined(self.logprobs, "kept_vocab_T")),
            "dvp/kept_vocab_per_token_rollout": _mean(torch.cat(self.kept_vocab_infer)),
            "dvp/sampled_outside_train_support_fraction": _mean(outside_T),
            "dvp/sampled_outside_train_support_count": float(outside_T.sum()),
            "dvp/outside_delta_abs_mean": _mean((full_T - unmasked_infer_T)[outside_T].abs()),
        }


def _joined(parts: Sequence[TokenLogprobs] | Sequence[Weights], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as the trainer sees it: its advantage, the number of its safe set's rule, its request's seed."""

    rollout: Rollout
    advantage: float
    threshold: float
    seed: int


def forward_logprobs(model: PreTrainedModel, samples: Sequence[Sample], run: Run) -> tuple[TokenLogprobs, Batch]:
    """The trainer's log-probs of one packed micro-batch, on its own safe set."""
    weight_VH = head_weight(model)
    batch = pack_batch(
        [s.rollout.prompt_tokens for s in samples], [s.rollout.tokens for s in samples], weight_VH.device
    )
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    threshold_N = torch.tensor([s.threshold for s in samples], device=weight_VH.device)
    rule = "full" if run.vocabulary.side == "sampler" else run.vocabulary.rule
    fill = run.vocabulary.outside == "paper_fill"
    threshold_T1 = threshold_N[batch.sequence_T, None]
    temperature = run.training.temperature
    # The matched control: what is scored, as full and as constrained, is the distribution that was sampled from.
    matched = run.disturbance.side == "both" and run.disturbance.on_logits
    if not (run.sampler.exact or matched):
        return constrained_logprobs(hidden_TH, weight_VH, batch.targets_T, rule, threshold_T1, temperature, fill), batch
    # Whole rows of logits: an exact engine is met in their bits, and a disturbance acts on each.
    scoring = Scoring(rule, temperature, fill, run.disturbance if matched else UNDISTURBED)
    where = (batch.of_tokens([s.seed for s in samples]), batch.places())
    return exact_logprobs(hidden_TH, weight_VH, batch.targets_T, threshold_T1, scoring, *where), batch


@torch.no_grad()
def old_logprobs(model: PreTrainedModel, samples: Sequence[Sample], run: Run) -> list[Tensor]:
    """log π_train of every sample's tokens before the first update on them: [T] each, in the samples' order.

    −inf where the token lies outside the trainer's set.
    """
    old: dict[int, Tensor] = {}
    for group in _micro_batches(samples, run):
        logprobs, batch = forward_logprobs(model, [samples[i] for i in group], run)
        logp_T = logprobs.logp_T.masked_fill(logprobs.outside_T, -torch.inf)
        old.update(zip(group, torch.split(logp_T, list(batch.responses_N)), strict=True))
    return [old[i] for i in range(len(samples))]


def accumulate_gradients(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    run: Run,
    watch: Stopwatch,
    record: StepRecord,
    old: Sequence[Tensor] | None = None,
) -> float:
    """Forward and backward over the micro-batches of one update; gradients add up in the model.

    Args:
        model: the policy.
        samples: the rollouts of this update.
        run: estimator, vocabulary, correction and clip.
        watch: gets the seconds of the phases forward and backward.
        record: gets what the diagnostics need.
        old: log π_train of each sample's tokens before the first update on these rollouts; None where this update
            is the first, and the present log-probs are the old ones.

    Returns:
        The loss, one mean over all samples.

    Raises:
        NumericalError: a log-prob or the loss is not finite.
    """
    loss_sum = 0.0
    for group in _micro_batches(samples, run):
        chosen = [samples[i] for i in group]
        with watch.phase("forward"):
            logprobs, batch = forward_logprobs(model, chosen, run)
            device = logprobs.logp_T.device
            logp_infer_T = _concatenate([s.rollout.logp_infer_T for s in chosen], device)
            advantage_T = torch.tensor([s.advantage for s in chosen], device=device)[batch.sequence_T]
            part = surrogate(
                logprobs,
                logp_infer_T,
                advantage_T,
                batch.sequence_T,
                len(group),
                len(samples),
                run.correction,
                run.clip,
                None if old is None else torch.cat([old[i] for i in group]),
            )
            loss_sum += part.loss.item()
        # A nan logit lies in no safe set: the loss alone would not show it.
        if not logprobs.logp_full_T.isfinite().all():
            raise NumericalError(f"the loss is {loss_sum}: the policy's log-probs are no longer finite")
        if not np.isfinite(loss_sum):
            raise NumericalError(
                f"the loss is {loss_sum}: the log-probs are finite, but a ratio or an advantage is not"
            )
        with watch.phase("backward"):
            part.loss.backward()  # type: ignore[no-untyped-call]
        record.logprobs.append(logprobs)
        record.logp_infer.append(logp_infer_T)
        record.log_kept_infer.append(_concatenate([s.rollout.log_kept_infer_T for s in chosen], device))
        record.kept_vocab_infer.append(_concatenate([s.rollout.kept_vocab_infer_T for s in chosen], device))
        record.sequence.append(batch.sequence_T + record.sequences)
        record.advantage.append(advantage_T)
        record.clipped.append(part.clipped_T)
        record.weights.append(part.weights)
        record.sequences += len(group)
    return loss_sum


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
        run: the arm's settings; `training.minibatches` says how many updates share them.
        seed: of the order in which they are dealt to the minibatches.
        watch: gets the seconds of the phases.
        delayed: named weights of an earlier step, at which the gradient is taken; None for the policy's own.

    Returns:
        The mean loss and the mean gradient norm (before clipping) over the updates, and the step's record.

    Raises:
        NumericalError: a log-prob, a loss or a norm is not finite; what the updates before it changed stays.
    """
    record, losses, norms = StepRecord(), [], []
    count = run.training.minibatches
    order = np.random.default_rng(seed).permutation(len(samples)) if count > 1 else np.arange(len(samples))
    coarse = run.disturbance.weights if run.disturbance.side == "both" else None

    def scored() -> AbstractContextManager[None]:
        return computing_with(model, round_weights(named_weights(model), coarse) if delayed is None else delayed)

    old = None
    if count > 1 and run.clip is not None and run.clip.ratio != "bypass":
        with watch.phase("forward"), scored():
            old = old_logprobs(model, samples, run)
    for part in np.array_split(order, count):
        chosen = [samples[i] for i in part]
        before = None if old is None else [old[i] for i in part]
        done = len(record.weights)
        with scored():
            losses.append(accumulate_gradients(model, chosen, run, watch, record, before))
        if run.training.loss_mean == "kept":
            losses[-1] *= average_over_kept(model, record.weights[done:])
        with watch.phase("optimizer"):
            norms.append(optimizer_step(model, optimizer, run.training.max_grad_norm))
    return float(np.mean(losses)), float(np.mean(norms)), record


@torch.no_grad()
def average_over_kept(model: PreTrainedModel, weights: Sequence[Weights]) -> float:
    """Make the gradient of a mean over all responses of an update that of a mean over those that the weights keep.

    Args:
        model: holds the gradient; it stays as it is where no response is kept.
        weights: of the update's micro-batches.

    Returns:
        What the gradient was multiplied by: all responses over those with a weight above 0.
    """
    used_N = _joined(weights, "used_N")
    kept = int((used_N > 0).sum())
    factor = len(used_N) / kept if kept else 1.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return factor


def _micro_batches(samples: Sequence[Sample], run: Run) -> list[list[int]]:
    rollouts = [sample.rollout for sample in samples]
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return micro_batches([rollout.prompt_tokens for rollout in rollouts], lengths, run.training.token_budget)


def _concatenate(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
