"""One update: rollouts and their advantages in, one clipped optimizer step and its metrics out."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrl.errors import StudyError
from tailrl.mismatch import log_ratio_metrics, weight_metrics
from tailrl.objective.corrections import SequenceWeights, sequence_weights
from tailrl.objective.losses import policy_gradient
from tailrl.packing import micro_batches, pack_batch
from tailrl.policy import head_weight, hidden_states
from tailrl.records import Rollout
from tailrl.settings import Run
from tailrl.vocabulary import TokenLogprobs, token_logprobs


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
    weights: list[SequenceWeights] = field(default_factory=list)
    sequences: int = 0

    def tokens(self) -> dict[str, NDArray[np.generic]]:
        """Per-token arrays of the step, nats: what the figure of Δ by token probability is made from."""
        outside_T = torch.cat([lp.outside_T for lp in self.logprobs])
        logp_infer_T = torch.cat(self.logp_infer)
        return {
            "logp_train": torch.cat([lp.logp_full_T for lp in self.logprobs]).cpu().numpy(),
            "logp_infer": (logp_infer_T + torch.cat(self.log_kept_infer)).cpu().numpy(),
            "logp_train_masked": torch.cat([lp.logp_T.detach() for lp in self.logprobs]).cpu().numpy(),
            "logp_infer_masked": logp_infer_T.cpu().numpy(),
            "outside": outside_T.cpu().numpy(),
        }

    def metrics(self) -> dict[str, float]:
        """The step's mismatch, weights and vocabulary; the names are in `tailrl.metrics`."""
        logp_T = torch.cat([lp.logp_T.detach() for lp in self.logprobs])
        logp_full_T = torch.cat([lp.logp_full_T for lp in self.logprobs])
        log_kept_T = torch.cat([lp.log_kept_T for lp in self.logprobs])
        outside_T = torch.cat([lp.outside_T for lp in self.logprobs])
        logp_infer_T, log_kept_infer_T = torch.cat(self.logp_infer), torch.cat(self.log_kept_infer)
        sequence_T, inside_T = torch.cat(self.sequence), ~outside_T
        masked = log_ratio_metrics(logp_T[inside_T], logp_infer_T[inside_T], sequence_T[inside_T], self.sequences)
        unmasked = log_ratio_metrics(
            logp_full_T[inside_T], (logp_infer_T + log_kept_infer_T)[inside_T], sequence_T[inside_T], self.sequences
        )
        outside_delta_T = (logp_full_T - logp_infer_T - log_kept_infer_T)[outside_T]
        raw = weight_metrics(torch.cat([w.raw_N for w in self.weights]))
        used = weight_metrics(torch.cat([w.weight_N for w in self.weights]))
        return {
            "policy/entropy": torch.cat([lp.entropy_T for lp in self.logprobs]).mean().item(),
            **{f"rollout_corr/{name}": value for name, value in masked.items()},
            **{f"rollout_corr_unmasked/{name}": value for name, value in unmasked.items()},
            **{f"rollout_corr_raw/{name}": value for name, value in raw.items()},
            **{f"rollout_corr/{name}": value for name, value in used.items()},
            "rollout_corr/rollout_rs_seq_masked_fraction": _fraction([w.rejected_N for w in self.weights]),
            "rollout_corr/veto_seq_fraction": _fraction([w.vetoed_N for w in self.weights]),
            "dvp/kept_mass_train_mean": log_kept_T.exp().mean().item(),
            "dvp/kept_mass_train_min": log_kept_T.exp().min().item(),
            "dvp/kept_mass_rollout_mean": log_kept_infer_T.exp().mean().item(),
            "dvp/kept_mass_rollout_min": log_kept_infer_T.exp().min().item(),
            "dvp/kept_vocab_per_token_train": torch.cat([lp.kept_vocab_T for lp in self.logprobs])
            .float()
            .mean()
            .item(),
            "dvp/kept_vocab_per_token_rollout": torch.cat(self.kept_vocab_infer).float().mean().item(),
            "dvp/sampled_outside_train_support_fraction": outside_T.float().mean().item(),
            "dvp/sampled_outside_train_support_count": float(outside_T.sum()),
            "dvp/outside_delta_abs_mean": outside_delta_T.abs().mean().item(),
        }


def _fraction(flags: Sequence[Tensor]) -> float:
    return torch.cat(list(flags)).float().mean().item()


def accumulate_gradients(
    model: PreTrainedModel,
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    run: Run,
    watch: Stopwatch,
) -> tuple[float, StepRecord]:
    """Forward and backward over the micro-batches of a step; gradients add up in the model.

    Returns:
        The step's loss (one mean over all sampled sequences) and what the diagnostics need.

    Raises:
        StudyError: the loss is not finite.
    """
    log_rho = run.vocabulary.log_rho(model.config.vocab_size)
    loss_sum, record = 0.0, StepRecord()
    lengths = [len(r.prompt_tokens) + len(r.tokens) for r in rollouts]
    device = head_weight(model).device
    for group in micro_batches(lengths, run.training.token_budget):
        chosen = [rollouts[i] for i in group]
        with watch.phase("forward"):
            batch = pack_batch([r.prompt_tokens for r in chosen], [r.tokens for r in chosen], device)
            hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
            logits_TV = (hidden_TH @ head_weight(model).T).float() / run.training.temperature
            logprobs = token_logprobs(
                logits_TV, batch.targets_T, log_rho, paper_fill=run.vocabulary.outside == "paper_fill"
            )
            logp_infer_T = _concatenate([r.logp_infer_T for r in chosen], device)
            weights = sequence_weights(
                logprobs.logp_T.detach() - logp_infer_T,
                logprobs.outside_T,
                batch.sequence_T,
                len(group),
                run.correction,
            )
            advantage_N = torch.tensor([advantages[i] for i in group], device=device)
            loss = policy_gradient(logprobs.logp_T, batch.sequence_T, advantage_N, weights.weight_N, len(rollouts))
            loss_sum += loss.item()
        # A nan logit lies in no safe set: the loss alone would not show it.
        if not (np.isfinite(loss_sum) and logprobs.logp_full_T.isfinite().all()):
            raise StudyError(f"the loss is {loss_sum}: the policy's log-probs are no longer finite")
        with watch.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        record.logprobs.append(logprobs)
        record.logp_infer.append(logp_infer_T)
        record.log_kept_infer.append(_concatenate([r.log_kept_infer_T for r in chosen], device))
        record.kept_vocab_infer.append(_concatenate([r.kept_vocab_infer_T for r in chosen], device))
        record.sequence.append(batch.sequence_T + record.sequences)
        record.weights.append(weights)
        record.sequences += len(group)
    return loss_sum, record


def optimizer_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    """Clip the gradient, take the step, clear the gradient; returns the norm before clipping.

    Raises:
        StudyError: the norm is not finite.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
    if not np.isfinite(norm):
        raise StudyError(f"the gradient's norm is {norm}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _concatenate(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
