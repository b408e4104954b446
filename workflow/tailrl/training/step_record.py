"""What a step leaves behind for the diagnostics: how long its phases took, rewards, lengths and every token's
log-probs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.objective.corrections import Weights, sequence_sum
from tailrl.objective.diagnostics import advantage_skew, log_ratio_metrics, weight_metrics
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.rollout.types import Rollout


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


@dataclass(frozen=True, slots=True)
class Part:
    """What one micro-batch, of T tokens in N sequences, leaves behind; nothing carries a gradient.

    Attributes:
        loss: float64 scalar, its share in the loss of the update.
        logprobs: the trainer's, before the first update on these rollouts where they are known.
        logp_infer_T: nats, the sampler's log π'^mp.
        log_kept_infer_T: nats, the sampler's log Z'.
        kept_vocab_infer_T: int32, the sampler's |V'_S|.
        sequence_T: int64, the sequence of each token, from 0.
        advantage_T: of its sequence.
        clipped_T: bool, whether the clipped branch is taken.
        weights: in the loss.
    """

    loss: Tensor
    logprobs: TokenLogprobs
    logp_infer_T: Tensor
    log_kept_infer_T: Tensor
    kept_vocab_infer_T: Tensor
    sequence_T: Tensor
    advantage_T: Tensor
    clipped_T: Tensor
    weights: Weights


@dataclass(slots=True)
class StepRecord:
    """What the micro-batches of a step leave behind for the diagnostics: a part for each micro-batch.

    Sequences are renumbered over the whole step, in the order in which they were trained on.
    """

    parts: list[Part] = field(default_factory=list)
    sequences: int = 0

    def add(self, part: Part) -> None:
        """Take in the next micro-batch."""
        self.parts.append(replace(part, sequence_T=part.sequence_T + self.sequences))
        self.sequences += len(part.weights.used_N)

    def of(self, name: str, since: int = 0) -> Tensor:
        """A field of all parts but the first `since`, one after another; `weights.used_N` for one of the weights'."""
        return torch.cat([attrgetter(name)(part) for part in self.parts[since:]]).detach()

    def tokens(self) -> dict[str, NDArray[np.generic]]:
        """Per-token arrays of the step, nats: what the figure of Δ by token probability is made from."""
        logp_infer_T = self.of("logp_infer_T")
        return {
            "logp_train": self._unmasked().cpu().numpy(),
            "logp_infer": (logp_infer_T + self.of("log_kept_infer_T")).cpu().numpy(),
            "logp_train_masked": self.of("logprobs.logp_T").cpu().numpy(),
            "logp_infer_masked": logp_infer_T.cpu().numpy(),
            "outside": self.of("logprobs.outside_T").cpu().numpy(),
        }

    def _unmasked(self) -> Tensor:
        """The trainer's log π of every token, summed as the sampler's is, log π^mp + log Z, where it lies in the set:
        equal parts then give equal sums."""
        names = ("logp_T", "log_kept_T", "logp_full_T", "outside_T")
        logp_T, log_kept_T, full_T, outside_T = (self.of(f"logprobs.{name}") for name in names)
        return torch.where(outside_T, full_T, logp_T + log_kept_T)

    def lost_mass_per_response(self) -> float:
        """Mean over responses of Σ_t (1 − Z_t) in the trainer: Prop. 5.5's bound on the bias, per unit of reward."""
        lost_T = -self.of("logprobs.log_kept_T").expm1()
        return sequence_sum(lost_T, self.of("sequence_T"), self.sequences).mean().item()

    def bias_bounds(self) -> dict[str, float]:
        """Prop. 5.5 per unit of reward: the paper's bound, and the total variation between the full policy and the
        constrained one, E[1 − Π_t Z_t], which it bounds."""
        log_kept_T, sequence_T = self.of("logprobs.log_kept_T").double(), self.of("sequence_T")
        longest = sequence_T.bincount().max()
        return {
            "dvp/bias_bound_paper": (longest * -log_kept_T.min().expm1()).item(),
            "dvp/total_variation": _mean(-sequence_sum(log_kept_T, sequence_T, self.sequences).expm1()),
        }

    def metrics(self) -> dict[str, float]:
        """The step's mismatch, weights and vocabulary; the names are in `tailrl.tracking.metrics`."""
        logp_T, outside_T = self.of("logprobs.logp_T"), self.of("logprobs.outside_T")
        logp_infer_T, log_kept_infer_T = self.of("logp_infer_T"), self.of("log_kept_infer_T")
        unmasked_infer_T = logp_infer_T + log_kept_infer_T
        sequence_T, inside_T = self.of("sequence_T"), ~outside_T
        masked = (logp_T[inside_T], logp_infer_T[inside_T])
        full_T = self._unmasked()
        mass_T = self.of("logprobs.log_kept_T").exp()
        groups = {
            "rollout_corr": log_ratio_metrics(
                logp_T.masked_fill(outside_T, -torch.inf), logp_infer_T, sequence_T, self.sequences, outside_T
            )
            | advantage_skew(*masked, self.of("advantage_T")[inside_T])
            | weight_metrics(self.of("weights.used_N")),
            "rollout_corr_unmasked": log_ratio_metrics(full_T, unmasked_infer_T, sequence_T, self.sequences, outside_T),
            "rollout_corr_raw": weight_metrics(self.of("weights.raw_N")),
        }
        return {
            **{f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()},
            "policy/entropy": _mean(self.of("logprobs.entropy_T")),
            "policy/clip_fraction": _mean(self.of("clipped_T")),
            "rollout_corr/rollout_rs_masked_fraction": _mean(self.of("weights.masked_T")),
            "rollout_corr/rollout_rs_seq_masked_fraction": _mean(self.of("weights.rejected_N")),
            "rollout_corr/veto_seq_fraction": _mean(self.of("weights.vetoed_N")),
            "dvp/kept_mass_train_mean": _mean(mass_T),
            "dvp/kept_mass_train_min": mass_T.min().item(),
            "dvp/kept_mass_rollout_mean": _mean(log_kept_infer_T.exp()),
            "dvp/kept_mass_rollout_min": log_kept_infer_T.exp().min().item(),
            "dvp/lost_mass_per_response": self.lost_mass_per_response(),
            **self.bias_bounds(),
            "dvp/kept_vocab_per_token_train": _mean(self.of("logprobs.kept_vocab_T")),
            "dvp/kept_vocab_per_token_rollout": _mean(self.of("kept_vocab_infer_T")),
            "dvp/sampled_outside_train_support_fraction": _mean(outside_T),
            "dvp/sampled_outside_train_support_count": float(outside_T.sum()),
            "dvp/outside_delta_abs_mean": _mean((full_T - unmasked_infer_T)[outside_T].abs()),
        }


def reward_metrics(rewards_PG: NDArray[np.float32]) -> dict[str, float]:
    """Of P problems with G responses each."""
    means_P = rewards_PG.mean(axis=1)
    return {
        "reward/mean": float(means_P.mean()),
        "reward/all_right_fraction": float((means_P == 1).mean()),
        "reward/all_wrong_fraction": float((means_P == 0).mean()),
    }


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths in tokens, and how many ended by themselves."""
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        "response/length_mean": float(np.mean(lengths)),
        "response/length_max": float(max(lengths)),
        "response/stopped_fraction": float(np.mean([rollout.stopped for rollout in rollouts])),
    }


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
