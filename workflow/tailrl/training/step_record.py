"""What a step leaves behind for the diagnostics: how long its phases took, rewards, lengths and every token's
log-probs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.objective.corrections import Weights, sequence_sum
from tailrl.objective.diagnostics import advantage_skew, log_ratio_metrics, weight_metrics
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.rollout.types import Rollout
from tailrl.tracking import metrics as keys


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

    def add(self, part: Part) -> None:
        """Take in the next micro-batch."""
        self.logprobs.append(part.logprobs)
        self.logp_infer.append(part.logp_infer_T)
        self.log_kept_infer.append(part.log_kept_infer_T)
        self.kept_vocab_infer.append(part.kept_vocab_infer_T)
        self.sequence.append(part.sequence_T + self.sequences)
        self.advantage.append(part.advantage_T)
        self.clipped.append(part.clipped_T)
        self.weights.append(part.weights)
        self.sequences += len(part.weights.used_N)

    def used(self, since: int) -> Tensor:
        """The weights that the sequences of all micro-batches but the first `since` are left with."""
        return _joined(self.weights[since:], "used_N")

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
            keys.BIAS_BOUND: (longest * -log_kept_T.min().expm1()).item(),
            keys.TOTAL_VARIATION: _mean(-sequence_sum(log_kept_T, sequence_T, self.sequences).expm1()),
        }

    def metrics(self) -> dict[str, float]:
        """The step's mismatch, weights and vocabulary; the names are in `tailrl.tracking.metrics`."""
        logp_T, outside_T = _joined(self.logprobs, "logp_T").detach(), _joined(self.logprobs, "outside_T")
        logp_infer_T, log_kept_infer_T = torch.cat(self.logp_infer), torch.cat(self.log_kept_infer)
        unmasked_infer_T = logp_infer_T + log_kept_infer_T
        sequence_T, inside_T = torch.cat(self.sequence), ~outside_T
        masked = (logp_T[inside_T], logp_infer_T[inside_T])
        full_T = self._unmasked()
        mass_T = _joined(self.logprobs, "log_kept_T").exp()
        groups = {
            keys.CORR: log_ratio_metrics(
                logp_T.masked_fill(outside_T, -torch.inf), logp_infer_T, sequence_T, self.sequences, outside_T
            )
            | advantage_skew(*masked, torch.cat(self.advantage)[inside_T])
            | weight_metrics(_joined(self.weights, "used_N")),
            keys.CORR_UNMASKED: log_ratio_metrics(full_T, unmasked_infer_T, sequence_T, self.sequences, outside_T),
            keys.CORR_RAW: weight_metrics(_joined(self.weights, "raw_N")),
        }
        return {
            **{keys.in_group(group, name): v for group, values in groups.items() for name, v in values.items()},
            keys.ENTROPY: _mean(_joined(self.logprobs, "entropy_T")),
            keys.CLIPPED: _mean(torch.cat(self.clipped)),
            keys.MASKED_TOKENS: _mean(_joined(self.weights, "masked_T")),
            keys.REJECTED: _mean(_joined(self.weights, "rejected_N")),
            keys.VETOED: _mean(_joined(self.weights, "vetoed_N")),
            keys.KEPT_MASS_TRAIN: _mean(mass_T),
            keys.KEPT_MASS_TRAIN_MIN: mass_T.min().item(),
            keys.KEPT_MASS_ROLLOUT: _mean(log_kept_infer_T.exp()),
            keys.KEPT_MASS_ROLLOUT_MIN: log_kept_infer_T.exp().min().item(),
            keys.LOST_MASS: self.lost_mass_per_response(),
            **self.bias_bounds(),
            keys.KEPT_VOCAB_TRAIN: _mean(_joined(self.logprobs, "kept_vocab_T")),
            keys.KEPT_VOCAB_ROLLOUT: _mean(torch.cat(self.kept_vocab_infer)),
            keys.OUTSIDE: _mean(outside_T),
            keys.OUTSIDE_COUNT: float(outside_T.sum()),
            keys.OUTSIDE_DELTA: _mean((full_T - unmasked_infer_T)[outside_T].abs()),
        }


def reward_metrics(rewards_PG: NDArray[np.float32]) -> dict[str, float]:
    """Of P problems with G responses each."""
    means_P = rewards_PG.mean(axis=1)
    return {
        keys.REWARD: float(means_P.mean()),
        keys.ALL_RIGHT: float((means_P == 1).mean()),
        keys.ALL_WRONG: float((means_P == 0).mean()),
    }


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths in tokens, and how many ended by themselves."""
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        keys.LENGTH: float(np.mean(lengths)),
        keys.LENGTH_MAX: float(max(lengths)),
        keys.STOPPED: float(np.mean([rollout.stopped for rollout in rollouts])),
    }


def _joined(parts: Sequence[TokenLogprobs] | Sequence[Weights], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
