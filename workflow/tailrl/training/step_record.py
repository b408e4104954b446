"""The record of a step for the diagnostics: times of its phases, rewards, lengths and every token's log-probs."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.objective.corrections import Weights, normaliser
from tailrl.objective.diagnostics import (
    advantage_skew,
    log_ratio_metrics,
    routing_metrics,
    weight_metrics,
)
from tailrl.objective.reference_kl import token_kl
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.objective.sequences import sequence_sum
from tailrl.rollout.types import Rollout
from tailrl.runtime import distributed
from tailrl.stats.verl import verl_metrics
from tailrl.tracking import metrics as keys
from tailrl.training.routes import as_bits

UNCORRECTED = Correction()


@dataclass(slots=True)
class Stopwatch:
    """The times of a step's named phases.

    A GPU works on what the CPU asked of it earlier. There an event marks each start and end in the GPU's own order, and
    nothing waits for it before `read`.
    """

    phases: list[tuple[str, Any, Any]] = field(default_factory=list)  # name, start, end

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to the phase, time of other phases within it included."""
        start = _now()
        try:
            yield
        finally:
            self.phases.append((name, start, _now()))

    def read(self) -> dict[str, float]:
        """Seconds spent in each phase so far; waits for the GPU."""
        seconds: dict[str, float] = {}
        if self.phases and not isinstance(self.phases[-1][2], float):
            self.phases[-1][2].synchronize()
        for name, start, end in self.phases:
            spent = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
            seconds[name] = seconds.get(name, 0.0) + spent
        return seconds


def _now() -> Any:
    """The time in seconds, or an event on the GPU's stream."""
    if distributed.device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class Part:
    """The record of one micro-batch, T tokens in N sequences, without gradient."""

    loss: Tensor  # float64 scalar, its share of the update's loss
    logprobs: TokenLogprobs  # the trainer's, from before the first update on these rollouts where known
    logp_infer_T: Tensor  # nats, the sampler's log π'^mp
    log_kept_infer_T: Tensor  # nats, the sampler's log Z'
    kept_vocab_infer_T: Tensor  # int32, the sampler's |V'_S|
    sequence_T: Tensor  # int64, the sequence of each token, from 0
    advantage_T: Tensor  # of the token's sequence
    clipped_T: Tensor  # bool, whether the clipped branch is taken
    weights: Weights  # in the loss
    number_N: Tensor  # int64, the number of each sequence among the samples of the update
    logp_ref_T: Tensor | None = None  # nats, the reference policy's; None without one
    flips_TL: Tensor | None = None  # bool, `routes.flips`; None where the sampler gave no experts


@dataclass(slots=True)
class StepRecord:
    """The record of a step's micro-batches for the diagnostics: one list entry per micro-batch.

    Sequences are renumbered over the whole step, in training order.
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
        """Per-token arrays of the step, nats, for the figure of Δ by token probability."""
        logp_infer_T = self.of("logp_infer_T")
        flipped = {"flips": as_bits(self.of("flips_TL")).cpu().numpy()} if self.routed else {}
        return flipped | {
            "logp_train": self._unmasked().cpu().numpy(),
            "logp_infer": (logp_infer_T + self.of("log_kept_infer_T")).cpu().numpy(),
            "logp_train_masked": self.of("logprobs.logp_T").cpu().numpy(),
            "logp_infer_masked": logp_infer_T.cpu().numpy(),
            "outside": self.of("logprobs.outside_T").cpu().numpy(),
        }

    @property
    def routed(self) -> bool:
        """Whether the sampler gave its experts."""
        return all(part.flips_TL is not None for part in self.parts)

    def routing(self) -> dict[str, float]:
        """Metrics of flips, tokens whose experts differ; empty where the sampler gave none."""
        if not self.routed:
            return {}
        log_ratio_T = self._unmasked() - self.of("logp_infer_T") - self.of("log_kept_infer_T")
        return routing_metrics(self.of("flips_TL"), log_ratio_T)

    def order(self) -> list[int]:
        """The number of each sequence among the step's samples, in training order."""
        return [int(number) for number in self.of("number_N")]

    def _unmasked(self) -> Tensor:
        """The trainer's log π of every token; inside V_S it is log π^mp + log Z, summed as the sampler's is, so that
        equal parts give equal sums."""
        names = ("logp_T", "log_kept_T", "logp_full_T", "outside_T")
        logp_T, log_kept_T, full_T, outside_T = (self.of(f"logprobs.{name}") for name in names)
        return torch.where(outside_T, full_T, logp_T + log_kept_T)

    def lost_mass_per_response(self) -> float:
        """E[Σ_t (1 − Z_t)] per response, in the trainer; times the range of R it bounds |J_mp − J| (Prop. 5.5)."""
        lost_T = -self.of("logprobs.log_kept_T").expm1()
        return sequence_sum(lost_T, self.of("sequence_T"), self.sequences).mean().item()

    def bias_bounds(self) -> dict[str, float]:
        """Prop. 5.5, |J_mp − J| ≤ R_max T (1 − Z_min), per unit of reward: the paper's bound T (1 − Z_min), and the
        total variation that it bounds, E[1 − Π_t Z_t], between the full and the constrained policy."""
        log_kept_T, sequence_T = self.of("logprobs.log_kept_T").double(), self.of("sequence_T")
        longest = sequence_T.bincount().max()
        return {
            keys.BIAS_BOUND: (longest * -log_kept_T.min().expm1()).item(),
            keys.TOTAL_VARIATION: _mean(-sequence_sum(log_kept_T, sequence_T, self.sequences).expm1()),
        }

    def reference_kl(self) -> dict[str, float]:
        """k1 and k3 of the policy against its reference, means over tokens inside the set; NaN without a reference."""
        names = {keys.REFERENCE_K1: "k1", keys.REFERENCE_K3: "k3"}
        if any(part.logp_ref_T is None for part in self.parts):
            return dict.fromkeys(names, math.nan)
        logp_T, logp_ref_T, outside_T = (self.of(x) for x in ("logprobs.logp_T", "logp_ref_T", "logprobs.outside_T"))
        return {key: _mean(token_kl(name, logp_T, logp_ref_T, outside_T)[~outside_T]) for key, name in names.items()}

    def metrics(self, correction: Correction = UNCORRECTED) -> dict[str, float]:
        """Metrics of the step's mismatch, weights and safe sets; `tailrl.tracking.metrics` has their names.

        `correction` is the arm's, for verl's definitions, which follow its thresholds.
        """
        logp_T, outside_T = self.of("logprobs.logp_T"), self.of("logprobs.outside_T")
        logp_infer_T, log_kept_infer_T = self.of("logp_infer_T"), self.of("log_kept_infer_T")
        unmasked_infer_T = logp_infer_T + log_kept_infer_T
        sequence_T, inside_T = self.of("sequence_T"), ~outside_T
        masked = (logp_T[inside_T], logp_infer_T[inside_T])
        full_T = self._unmasked()
        mass_T = self.of("logprobs.log_kept_T").exp()
        given_T = logp_T.masked_fill(outside_T, -torch.inf)
        groups = {
            keys.CORR: log_ratio_metrics(given_T, logp_infer_T, sequence_T, self.sequences, outside_T)
            | advantage_skew(*masked, self.of("advantage_T")[inside_T])
            | weight_metrics(self.of("weights.used_N")),
            keys.CORR_UNMASKED: log_ratio_metrics(full_T, unmasked_infer_T, sequence_T, self.sequences, outside_T),
            keys.CORR_RAW: weight_metrics(self.of("weights.raw_N")),
            keys.CORR_VERL: self._by_verl(given_T - logp_infer_T, correction),
        }
        return {
            **{keys.in_group(group, name): v for group, values in groups.items() for name, v in values.items()},
            keys.ENTROPY: _mean(self.of("logprobs.entropy_T")),
            **self.reference_kl(),
            keys.CLIPPED: _mean(self.of("clipped_T")),
            keys.TRUNCATED: _mean(self.of("weights.truncated_T")),
            keys.NORMALISER: normaliser(correction, self.of("weights.ratio_X")),
            keys.MASKED_TOKENS: _mean(self.of("weights.masked_T")),
            keys.REJECTED: _mean(self.of("weights.rejected_N")),
            keys.VETOED: _mean(self.of("weights.vetoed_N")),
            keys.KEPT_MASS_TRAIN: _mean(mass_T),
            keys.KEPT_MASS_TRAIN_MIN: mass_T.min().item(),
            keys.KEPT_MASS_ROLLOUT: _mean(log_kept_infer_T.exp()),
            keys.KEPT_MASS_ROLLOUT_MIN: log_kept_infer_T.exp().min().item(),
            keys.LOST_MASS: self.lost_mass_per_response(),
            **self.bias_bounds(),
            keys.KEPT_VOCAB_TRAIN: _mean(self.of("logprobs.kept_vocab_T")),
            keys.KEPT_VOCAB_ROLLOUT: _mean(self.of("kept_vocab_infer_T")),
            keys.OUTSIDE: _mean(outside_T),
            keys.OUTSIDE_COUNT: float(outside_T.sum()),
            keys.OUTSIDE_DELTA: _mean((full_T - unmasked_infer_T)[outside_T].abs()),
            **self.routing(),
        }

    def _by_verl(self, log_ratio_T: Tensor, correction: Correction) -> dict[str, float]:
        """verl's metrics at the threshold of the arm's weight: a response's where the arm has one, else a token's."""
        by_response = correction.sequence in ("is", "tis", "mis")
        most = correction.limit if by_response else correction.token_threshold
        sequence_T = self.of("sequence_T").cpu().numpy()
        return verl_metrics(log_ratio_T.double().cpu().numpy(), sequence_T, self.sequences, most, by_response)


def reward_metrics(rewards_PG: NDArray[np.float32]) -> dict[str, float]:
    """Reward metrics of P problems with G responses each."""
    means_P = rewards_PG.mean(axis=1)
    return {
        keys.REWARD: float(means_P.mean()),
        keys.ALL_RIGHT: float((means_P == 1).mean()),
        keys.ALL_WRONG: float((means_P == 0).mean()),
    }


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Response lengths in tokens, and the fraction that ended with the end token."""
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        keys.LENGTH: float(np.mean(lengths)),
        keys.LENGTH_MAX: float(max(lengths)),
        keys.STOPPED: float(np.mean([rollout.stopped for rollout in rollouts])),
    }


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
