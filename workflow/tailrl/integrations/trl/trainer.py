"""The objective inside TRL's trainers: constrained log-probs, and weights on the advantages.

TRL's own losses run unchanged. They are linear in the advantage, so that a term's weight w ≥ 0 goes onto its
advantage: w min(r A, clip(r) A) = min(r wA, clip(r) wA). A sampled token outside the trainer's safe set has ratio 0. If
no weight applies to it, it enters none of TRL's ratios, and its term is a constant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite, log
from typing import Any, cast

import torch
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.integrations.trl.checks import check_settings, check_trainer
from tailrl.integrations.trl.head import NOT_SCORED, language_model, score_constrained
from tailrl.integrations.trl.sampler import recorded_generate, recorded_vllm
from tailrl.objective.corrections import Weights
from tailrl.objective.diagnostics import loss_metrics
from tailrl.objective.loss import LossInputs, loss
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.runtime.errors import NumericalError
from tailrl.tracking import metrics as keys

OLD, SAMPLER = "old_per_token_logps", "sampling_per_token_logps"
"""Keys of TRL's batches: log-probs [N, C] of the trainer before its first update (−inf outside its set), and of the
sampler."""

OLD_KEPT = "old_per_token_log_kept"
"""Key of ours beside OLD: log Z [N, C] of the trainer's set before its first update."""


def spread(values_T: Tensor, mask_NC: Tensor) -> Tensor:
    """Values of T tokens at their positions in padded rows [N, C]; 0 elsewhere."""
    return values_T.new_zeros(mask_NC.shape).masked_scatter(mask_NC, values_T)


def _joined(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask [N, L] of prompts and responses."""
    parts = ("ids", "mask")
    ids_NL, mask_NL = (torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for part in parts)
    return ids_NL, mask_NL


class DVPMixin:
    """A base class to go before RLOOTrainer or GRPOTrainer, as `with_dvp` puts it.

    Attributes:
        rho: of min-p.
        correction: the weights of the responses.
    """

    rho: float
    correction: Correction

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # model, reward_funcs and args may be positional.
        settings = kwargs.get("args", args[2] if len(args) > 2 else None)
        check_settings(settings, self.rho, kwargs)
        super().__init__(*args, **kwargs)
        trainer = cast(Any, self)
        model = trainer.accelerator.unwrap_model(trainer.model)
        check_trainer(trainer, model)
        score_constrained(language_model(model), log(self.rho), trainer.temperature)
        self._found: tuple[Tensor, Tensor, None] | None = None  # for TRL's loss, while it runs
        self._old: dict[str, Tensor] = {}
        self._sampled: list[list[float]] = []

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        trainer = cast(Any, self)
        if trainer.use_vllm:
            with recorded_vllm(trainer.vllm_generation) as found:
                yield found
        else:
            model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            with recorded_generate(model, log(self.rho), trainer.temperature) as found:
                yield found

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """RLOOTrainer's returns the responses' tokens; GRPOTrainer's also their log-probs."""
        with self._recording() as found:
            result = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        responses = result[0] if isinstance(result, tuple) else result
        [rows] = found
        rows = rows.tolist() if isinstance(rows, Tensor) else rows
        self._sampled = [list(row[: len(tokens)]) for row, tokens in zip(rows, responses, strict=True)]
        # None is a token that vLLM did not score.
        if not all(isfinite(logp) for row in self._sampled for logp in row if logp is not None):
            raise NumericalError("a log-prob of the sampler is not finite")
        return (responses, self._sampled) if isinstance(result, tuple) else result

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._old = {}
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        batch |= self._old
        if SAMPLER not in batch:
            batch[SAMPLER] = torch.zeros_like(batch["completion_ids"], dtype=torch.float32)
            for row_C, values in zip(batch[SAMPLER], self._sampled, strict=True):
                row_C[: len(values)] = torch.tensor([float("nan") if x is None else x for x in values])
        return batch

    def _score(self, model: Any, input_ids: Tensor, attention_mask: Tensor, mask_NC: Tensor) -> TokenLogprobs:
        """The trainer's log-probs of the mask's T tokens, among the last C of each row."""
        scored_NC = input_ids[:, -mask_NC.shape[1] :].masked_fill(~mask_NC, NOT_SCORED)
        # The sampler's positions, from the first token after the padding; TRL's own count includes the padding.
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        with cast(Any, self).accelerator.autocast():
            fields = model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, scored_NC=scored_NC
            )
        return TokenLogprobs(*fields)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log π^mp [N, C] and its entropy; before the loss runs, −inf for a token outside the set, no entropy."""
        if self._found is not None:
            return self._found
        logp_rows, kept_rows = [], []
        size = batch_size or len(input_ids)
        for ids_NL, attended_NL in zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True):
            mask_NC = attended_NL[:, -logits_to_keep:].bool()
            found = self._score(model, ids_NL, attended_NL, mask_NC)
            logp_rows.append(spread(found.logp_T.masked_fill(found.outside_T, -torch.inf), mask_NC))
            kept_rows.append(spread(found.log_kept_T, mask_NC))
        self._old = {OLD: torch.cat(logp_rows), OLD_KEPT: torch.cat(kept_rows)}
        return self._old[OLD], None, None

    @torch.no_grad()
    def score_batch(self, batch: dict[str, Any]) -> Tensor:
        """Log π^mp [N, C] of the responses of a batch of TRL's; −inf for a token outside the set."""
        trainer = cast(Any, self)
        input_ids, attention_mask = _joined(batch)
        size, length = trainer.args.per_device_train_batch_size, batch["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(trainer.model, input_ids, attention_mask, length, size)[0]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask_NC = inputs["completion_mask"].bool()
        count = len(mask_NC)
        sequence_T = torch.arange(count, device=mask_NC.device)[:, None].expand_as(mask_NC)[mask_NC]
        found = self._score(model, *_joined(inputs), mask_NC)
        # TRL scores a batch before its updates only where one comes before its last loss.
        before_T = found.logp_T.detach().masked_fill(found.outside_T, -torch.inf)
        kept_T = found.log_kept_T.detach()
        if OLD in inputs:
            before_T, kept_T = inputs[OLD][mask_NC], inputs[OLD_KEPT][mask_NC]
        outside_T = found.outside_T | before_T.isneginf()
        logp_T, old_T = (values_T.masked_fill(outside_T, 0.0) for values_T in (found.logp_T, before_T))
        sampler_T = inputs[SAMPLER][mask_NC].to(old_T.dtype)
        # vLLM may fail to score a token: its ratio counts as 1, as in TRL.
        sampler_T = torch.where(sampler_T.isnan(), old_T, sampler_T)
        advantages_N = inputs["advantages"]
        inputs_T = LossInputs(
            trainer=found,
            logp_sampler_T=sampler_T,
            advantage_T=advantages_N[sequence_T],
            sequence_T=sequence_T,
            sequences=count,
            denominator=count,
            logp_old_T=old_T.masked_fill(outside_T, -torch.inf),
        )
        weights = loss(inputs_T, correction=self.correction).weights
        weight_NC = spread(weights.weight_T, mask_NC)
        if "old_logps" in inputs:  # RLOOTrainer: one ratio a response
            changed = {"advantages": advantages_N * weight_NC.amax(1), "old_logps": spread(old_T, mask_NC).sum(1)}
        else:
            changed = {"advantages": advantages_N[:, None] * weight_NC, OLD: spread(old_T, mask_NC)}
        self._note(before_T, kept_T, sampler_T, sequence_T, weights)
        self._found = spread(logp_T, mask_NC), spread(found.entropy_T, mask_NC), None
        try:
            return cast(Tensor, super()._compute_loss(model, inputs | changed))  # type: ignore[misc]
        finally:
            self._found = None

    @torch.no_grad()
    def _note(self, before_T: Tensor, kept_T: Tensor, sampler_T: Tensor, sequence_T: Tensor, weights: Weights) -> None:
        """Adds the means over processes to TRL's metrics, under the keys of `tailrl.tracking.metrics`.

        `before_T` and `kept_T` are from before the first update on the batch, and so is each metric: later log-probs
        hold the policy's own updates. The number of tokens outside is a sum over processes. TRL logs each as a mean
        over its calls of the loss.
        """
        trainer = cast(Any, self)
        values = loss_metrics(before_T, kept_T, sampler_T, sequence_T, weights)
        own = torch.tensor(list(values.values()), device=sampler_T.device)
        all_RK = trainer.accelerator.gather(own[None])
        mode = "train" if trainer.model.training else "eval"
        for name, values_R in zip(values, all_RK.unbind(1), strict=True):
            over_ranks = values_R.nansum() if name == keys.OUTSIDE_COUNT else values_R.nanmean()
            trainer._metrics[mode][name].append(over_ranks.item())
