"""The trainer's log-probs of sampled tokens: one scorer an arm, chosen once, as its sampler is.

It runs the policy over a packed micro-batch, and scores each response token from its hidden state on the trainer's own
safe set, or on the sampler's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.kernels.exact_logprobs import Scoring, exact_logprobs
from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.kernels.packing import Batch
from tailrl.kernels.whole_rows import whole_row_scores
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import named_weights
from tailrl.model.quantized import projections, rounded_weights
from tailrl.model.routing import Routing
from tailrl.objective.disturbance import UNDISTURBED, computing_with, round_weights
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError
from tailrl.training.placement import as_forward
from tailrl.training.routes import check_routes, flips, packed
from tailrl.training.samples import Sample, in_micro_batches

NamedWeights = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Scored:
    """N responses with T tokens as the trainer scores them."""

    batch: Batch
    logprobs: TokenLogprobs
    expected_T: Tensor | None  # the expected score of each token; None without centering
    flips_TL: Tensor | None  # `routes.flips`; None where the sampler gave no experts


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch of T response tokens, each with the last hidden state that predicts it."""

    hidden_TH: Tensor
    weight_VH: Tensor  # of the head
    threshold_T1: Tensor  # ln ρ, k or p
    batch: Batch
    samples: Sequence[Sample]


ScoreRows = Callable[[Rows, Run], tuple[TokenLogprobs, Tensor | None]]
"""The log-probs of some rows' tokens; with centering the expected score of each, else None."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores packed responses under an arm's settings."""

    run: Run
    score_rows: ScoreRows

    def __call__(self, model: PreTrainedModel, samples: Sequence[Sample]) -> Scored:
        """The trainer's log-probs of one packed micro-batch, with gradient where it is enabled.

        Raises:
            StudyError: the experts that are to be replayed are missing, or are not of this policy's shape.
            NumericalError: a hidden state, the head's weight or a logit is not finite.
        """
        run = self.run
        device = next(model.parameters()).device
        batch, sampler_routes_LPK = packed([sample.rollout for sample in samples], device)
        routing = None
        if sampler_routes_LPK is not None:
            check_routes(model, sampler_routes_LPK)
            routing = Routing(sampler_routes_LPK if run.training.routing_replay else None)
        elif run.training.routing_replay:
            raise ModelError(
                f"arm {run.arm}: training.routing_replay needs the sampler's experts, which it did not give"
            )

        def columns() -> tuple[Tensor | None, ...]:
            hidden_PH = hidden_states(model, batch.tokens_P, batch.packing, routing)
            threshold_N = torch.tensor([sample.threshold for sample in samples], device=device)
            rows = Rows(
                hidden_TH=hidden_PH[batch.predict_T],
                weight_VH=head_weight(model),
                threshold_T1=threshold_N[batch.sequence_T, None],
                batch=batch,
                samples=samples,
            )
            logprobs, expected_T = self.score_rows(rows, run)
            # Not the dataclass: before PyTorch 2.12 FSDP overlooks tensors in one, and gathers no weights for the
            # backward.
            return *(getattr(logprobs, field.name) for field in fields(logprobs)), expected_T

        # Together, since a sharded model has its head's weight whole only within its forward.
        *parts, expected_T = as_forward(model, columns)
        logprobs = TokenLogprobs(*cast(list[Tensor], parts))
        flips_TL = None
        if routing is not None and sampler_routes_LPK is not None:
            flips_TL = flips(routing, sampler_routes_LPK, batch)
        return Scored(batch, logprobs, expected_T, flips_TL)


def make_scorer(run: Run) -> Scorer:
    """The scorer that an arm's settings ask for."""
    if run.needs_distributions:
        return Scorer(run, score_distributions)
    # Whole rows of logits: an exact engine needs their bits, and a disturbance acts on each logit.
    if run.sampler.exact or _is_matched_control(run):
        return Scorer(run, score_exactly)
    return Scorer(run, score_tokens)


def score_tokens(rows: Rows, run: Run) -> tuple[TokenLogprobs, None]:
    """The sampled tokens' log-probs alone, chunk by chunk: what every arm without special needs has."""
    logprobs = constrained_logprobs(
        rows.hidden_TH,
        rows.weight_VH,
        rows.batch.targets_T,
        run.vocabulary.trainer_rule,
        rows.threshold_T1,
        run.training.temperature,
        run.vocabulary.outside == "paper_fill",
    )
    return logprobs, None


def score_exactly(rows: Rows, run: Run) -> tuple[TokenLogprobs, None]:
    """The bits of the exact engine; or, in a matched control, the disturbed distribution that was sampled from."""
    scoring = Scoring(
        run.vocabulary.trainer_rule,
        run.training.temperature,
        run.vocabulary.outside == "paper_fill",
        run.disturbance if _is_matched_control(run) else UNDISTURBED,
    )
    seeds = rows.batch.of_tokens([sample.seed for sample in rows.samples])
    logprobs = exact_logprobs(
        rows.hidden_TH.float(),
        rows.weight_VH.float(),
        rows.batch.targets_T,
        rows.threshold_T1,
        scoring,
        seeds,
        rows.batch.positions(),
    )
    return logprobs, None


def score_distributions(rows: Rows, run: Run) -> tuple[TokenLogprobs, Tensor | None]:
    """With the sampler's whole distribution at every token: its set replayed, or score centering."""
    logits_TV = np.concatenate([sample.rollout.logits_sampler_KV for sample in rows.samples])
    return whole_row_scores(
        rows.hidden_TH,
        rows.weight_VH,
        rows.batch.targets_T,
        torch.from_numpy(logits_TV).to(device=rows.weight_VH.device),
        rows.threshold_T1,
        run.training.temperature,
        run.vocabulary,
        run.correction,
    )


def _is_matched_control(run: Run) -> bool:
    """Whether the trainer scores the disturbed distribution that was sampled from, unmasked and masked."""
    return run.disturbance.side == "both" and run.disturbance.on_logits


@torch.no_grad()
def score_all(model: PreTrainedModel, samples: Sequence[Sample], scorer: Scorer) -> list[TokenLogprobs]:
    """The trainer's log-probs of every sample's tokens without gradient, in the samples' order, on all ranks.

    Raises:
        NumericalError: on any rank; raised on every rank.
    """
    scored: dict[int, TokenLogprobs] = {}
    groups = in_micro_batches(samples, range(len(samples)), scorer.run.training.token_budget)
    for index, _ in distributed.dealt(len(groups)):
        with distributed.raised_together():
            one = scorer(model, [samples[i] for i in groups[index]])
        scored |= zip(groups[index], one.logprobs.split(list(one.batch.responses_N)), strict=True)
    of_all_ranks = {number: logprobs for part in distributed.gathered(scored) for number, logprobs in part.items()}
    return [of_all_ranks[number] for number in range(len(samples))]


def computing_at(model: PreTrainedModel, run: Run, delayed: NamedWeights | None) -> AbstractContextManager[None]:
    """The model computes with the weights at which the arm takes its gradient: delayed, rounded, or its own.

    Delayed weights are those that the engine was handed: already as coarse as the disturbance makes them.
    """
    coarse = run.disturbance.weights if run.disturbance.side == "both" else None
    if delayed is None and coarse is None and not run.sampler.few_bit_trainer:
        return nullcontext()
    weights = round_weights(named_weights(model), coarse) if delayed is None else delayed
    quantized = projections(model) if run.sampler.few_bit_trainer else frozenset()
    return computing_with(model, rounded_weights(weights, quantized, run.sampler.formats))
