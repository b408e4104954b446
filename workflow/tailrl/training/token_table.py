"""The one table of a step's sampled tokens: what both sides say of each, and what the loss made of it.

A row is a token of a response. The engine's columns come with its rollouts, the trainer's with the forward pass, the
weights with the loss. Metrics are computed from the table, and the kept columns go to `tokens.npz`
(`artifacts.tokens`), which `diagnose` reads as a log.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.artifacts.tokens import TokenArrays
from tailrl.config.arm import Correction
from tailrl.objective.corrections import Weights, normaliser
from tailrl.objective.diagnostics import (
    advantage_skew,
    log_ratio_metrics,
    routing_metrics,
    weight_metrics,
)
from tailrl.objective.loss import LossOutputs
from tailrl.objective.reference_kl import token_kl
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.objective.sequences import sequence_sum
from tailrl.stats.verl import verl_metrics
from tailrl.tracking import metrics as keys
from tailrl.training.routes import as_bits
from tailrl.training.samples import Sample
from tailrl.training.scorer import Scored

UNCORRECTED = Correction()


@dataclass(frozen=True, slots=True)
class TokenTable:
    """T sampled tokens of N responses, response after response in training order, without gradient.

    The trainer's columns are r_corr's: at the weights that sampled, where a step has several updates. The effect of
    earlier updates is not a mismatch.
    """

    token_T: Tensor  # int64, ids
    sequence_T: Tensor  # int64, each token's response, 0 to N − 1
    logp_sampler_T: Tensor  # nats, the sampler's log π'^mp
    log_kept_sampler_T: Tensor  # nats, the sampler's log Z'
    kept_vocab_sampler_T: Tensor  # int32, the sampler's |V'_S|
    trainer: TokenLogprobs  # the trainer's columns
    advantage_T: Tensor  # of the token's response
    clipped_T: Tensor  # bool, whether the clipped branch is taken
    weights: Weights  # in the loss
    number_N: Tensor  # int64, the number of each response among the samples of the step
    reward_N: Tensor  # float32, of each response
    loss_M: Tensor  # float64, the share of each micro-batch in its update's loss
    logp_reference_T: Tensor | None = None  # nats, the reference policy's; None without one
    flips_TL: Tensor | None = None  # bool, `routes.flips`; None where the sampler gave no experts

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        numbers: Sequence[int],
        scored: Scored,
        outputs: LossOutputs,
        old: TokenLogprobs | None,
    ) -> Self:
        """The table of one micro-batch.

        Args:
            samples: its responses.
            numbers: of these responses in the step.
            scored: by the trainer at the present weights.
            outputs: the loss of these tokens.
            old: the trainer's columns from before the first update on these responses; None: the present ones.
        """
        inputs, device = outputs.inputs, scored.logprobs.logp_T.device
        return cls(
            token_T=scored.batch.targets_T,
            sequence_T=scored.batch.sequence_T,
            logp_sampler_T=inputs.logp_sampler_T,
            log_kept_sampler_T=sampler_column(samples, "log_kept_sampler_T", device),
            kept_vocab_sampler_T=sampler_column(samples, "kept_vocab_sampler_T", device),
            trainer=old or scored.logprobs,
            advantage_T=inputs.advantage_T,
            clipped_T=outputs.clipped_T,
            weights=outputs.weights,
            number_N=torch.tensor(numbers, dtype=torch.int64),
            reward_N=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
            loss_M=outputs.loss.detach().double()[None],
            logp_reference_T=inputs.logp_reference_T,
            flips_TL=scored.flips_TL,
        )

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """The rows of all tables, in order; their responses are renumbered from 0. A lacking column stays lacking."""
        counts = [len(table.number_N) for table in tables]
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        shifted = [
            replace(table, sequence_T=table.sequence_T + first) for table, first in zip(tables, firsts, strict=True)
        ]
        return cls(**{field.name: _joined([getattr(table, field.name) for table in shifted]) for field in fields(cls)})

    @property
    def responses(self) -> int:
        """N."""
        return len(self.number_N)

    def masked(self) -> Tensor:
        """The trainer's log π^mp, nats; −inf outside its safe set."""
        return self.trainer.in_set()

    def unmasked(self) -> Tensor:
        """The trainer's log π of every token; inside V_S it is log π^mp + log Z, summed as the sampler's is, so that
        equal parts give equal sums."""
        trainer = self.trainer
        return torch.where(trainer.outside_T, trainer.logp_full_T, trainer.logp_T + trainer.log_kept_T)

    def sampler_unmasked(self) -> Tensor:
        """The sampler's log π of every token."""
        return self.logp_sampler_T + self.log_kept_sampler_T

    def arrays(self, step: int) -> TokenArrays:
        """The columns that `tokens.npz` keeps; `artifacts.tokens` describes them."""
        sequence_T = self.sequence_T.cpu().numpy()
        lengths_N = np.bincount(sequence_T, minlength=self.responses)
        first_N = np.concatenate([[0], np.cumsum(lengths_N)[:-1]])
        columns: dict[str, NDArray[Any]] = {
            "step": np.full(len(sequence_T), step, np.int32),
            "logp_train": self.unmasked().float().cpu().numpy(),
            "logp_infer": self.sampler_unmasked().float().cpu().numpy(),
            "logp_train_masked": self.trainer.logp_T.float().cpu().numpy(),
            "logp_infer_masked": self.logp_sampler_T.float().cpu().numpy(),
            "outside": self.trainer.outside_T.cpu().numpy(),
            "token": self.token_T.cpu().numpy().astype(np.int32),
            "position": (np.arange(len(sequence_T)) - first_N[sequence_T]).astype(np.int32),
            "sequence": self.number_N.cpu().numpy().astype(np.int32)[sequence_T],
            "advantage": self.advantage_T.float().cpu().numpy(),
            "reward": self.reward_N.cpu().numpy()[sequence_T],
        }
        if self.flips_TL is not None:
            columns["flips"] = as_bits(self.flips_TL).cpu().numpy()
        return columns

    def lost_mass_per_response(self) -> float:
        """E[Σ_t (1 − Z_t)] per response, in the trainer; times the range of R it bounds |J_mp − J| (Prop. 5.5)."""
        lost_T = -self.trainer.log_kept_T.expm1()
        return sequence_sum(lost_T, self.sequence_T, self.responses).mean().item()

    def bias_bounds(self) -> dict[str, float]:
        """Prop. 5.5, |J_mp − J| ≤ R_max T (1 − Z_min), per unit of reward: the paper's bound T (1 − Z_min), and the
        total variation that it bounds, E[1 − Π_t Z_t], between the full and the constrained policy."""
        log_kept_T = self.trainer.log_kept_T.double()
        longest = self.sequence_T.bincount().max()
        return {
            keys.BIAS_BOUND: (longest * -log_kept_T.min().expm1()).item(),
            keys.TOTAL_VARIATION: _mean(-sequence_sum(log_kept_T, self.sequence_T, self.responses).expm1()),
        }

    def reference_kl(self) -> dict[str, float]:
        """k1 and k3 of the policy against its reference, means over tokens inside the set; NaN without a reference."""
        names = {keys.REFERENCE_K1: "k1", keys.REFERENCE_K3: "k3"}
        if self.logp_reference_T is None:
            return dict.fromkeys(names, math.nan)
        logp_T, outside_T = self.trainer.logp_T, self.trainer.outside_T
        estimates = {key: token_kl(name, logp_T, self.logp_reference_T, outside_T) for key, name in names.items()}
        return {key: _mean(estimate_T[~outside_T]) for key, estimate_T in estimates.items()}

    def routing(self) -> dict[str, float]:
        """Metrics of flips, tokens whose experts differ; empty where the sampler gave none."""
        if self.flips_TL is None:
            return {}
        # In this order: another one rounds otherwise.
        log_ratio_T = self.unmasked() - self.logp_sampler_T - self.log_kept_sampler_T
        return routing_metrics(self.flips_TL, log_ratio_T)

    def metrics(self, correction: Correction = UNCORRECTED) -> dict[str, float]:
        """Metrics of the step's mismatch, weights and safe sets; `tailrl.tracking.metrics` has their names.

        `correction` is the arm's, for verl's definitions, which follow its thresholds.
        """
        trainer, weights, sequence_T, count = self.trainer, self.weights, self.sequence_T, self.responses
        outside_T = trainer.outside_T
        inside_T = ~outside_T
        mass_T, mass_sampler_T = trainer.log_kept_T.exp(), self.log_kept_sampler_T.exp()
        full_T, full_sampler_T = self.unmasked(), self.sampler_unmasked()
        skew = advantage_skew(trainer.logp_T[inside_T], self.logp_sampler_T[inside_T], self.advantage_T[inside_T])
        groups = {
            keys.CORR: log_ratio_metrics(self.masked(), self.logp_sampler_T, sequence_T, count, outside_T)
            | skew
            | weight_metrics(weights.used_N),
            keys.CORR_UNMASKED: log_ratio_metrics(full_T, full_sampler_T, sequence_T, count, outside_T),
            keys.CORR_RAW: weight_metrics(weights.raw_N),
            keys.CORR_VERL: self._by_verl(correction),
        }
        return {
            **{keys.in_group(group, name): v for group, values in groups.items() for name, v in values.items()},
            keys.ENTROPY: _mean(trainer.entropy_T),
            **self.reference_kl(),
            keys.CLIPPED: _mean(self.clipped_T),
            keys.TRUNCATED: _mean(weights.truncated_T),
            keys.NORMALISER: normaliser(correction, weights.ratio_X),
            keys.MASKED_TOKENS: _mean(weights.masked_T),
            keys.REJECTED: _mean(weights.rejected_N),
            keys.VETOED: _mean(weights.vetoed_N),
            keys.KEPT_MASS_TRAIN: _mean(mass_T),
            keys.KEPT_MASS_TRAIN_MIN: mass_T.min().item(),
            keys.KEPT_MASS_ROLLOUT: _mean(mass_sampler_T),
            keys.KEPT_MASS_ROLLOUT_MIN: mass_sampler_T.min().item(),
            keys.LOST_MASS: self.lost_mass_per_response(),
            **self.bias_bounds(),
            keys.KEPT_VOCAB_TRAIN: _mean(trainer.kept_vocab_T),
            keys.KEPT_VOCAB_ROLLOUT: _mean(self.kept_vocab_sampler_T),
            keys.OUTSIDE: _mean(outside_T),
            keys.OUTSIDE_COUNT: float(outside_T.sum()),
            keys.OUTSIDE_DELTA: _mean((full_T - full_sampler_T)[outside_T].abs()),
            **self.routing(),
        }

    def _by_verl(self, correction: Correction) -> dict[str, float]:
        """verl's metrics at the threshold of the arm's weight: a response's where the arm has one, else a token's."""
        by_response = correction.sequence in ("is", "tis", "mis")
        most = correction.limit if by_response else correction.token_threshold
        log_ratio_T = (self.masked() - self.logp_sampler_T).double().cpu().numpy()
        return verl_metrics(log_ratio_T, self.sequence_T.cpu().numpy(), self.responses, most, by_response)


def sampler_column(samples: Sequence[Sample], name: str, device: torch.device) -> Tensor:
    """A column of the sampler's, [T], from the field of `Rollout` with this name."""
    return torch.from_numpy(np.concatenate([getattr(sample.rollout, name) for sample in samples])).to(device)


def _joined(values: Sequence[Any]) -> Any:
    """Columns one after another; those of a record field by field; None where one is."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], Tensor):
        return torch.cat(list(values)).detach()
    assert is_dataclass(values[0])
    kind: Any = type(values[0])
    return kind(*(_joined([getattr(value, field.name) for value in values]) for field in fields(kind)))


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
