"""Runs the model on sequences under changes, one sequence at a time, and returns reduced rows."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation.attention import ALONE
from tailrl.explanation.catalogue import Choice
from tailrl.explanation.inputs import Context, Inputs, chat_template
from tailrl.explanation.models import HEAD_INPUTS, LOGITS_TOO
from tailrl.explanation.products import HALVES, RoundedProducts
from tailrl.explanation.rows import CHUNK, Rows, reduced
from tailrl.model.forward import head_weight
from tailrl.model.policy import load_policy, load_tokenizer, local_folder
from tailrl.rollout.sampling import stop_tokens
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError, DataError, ModelError, say

MOST_VARIANTS = 1  # changed models beside the model itself


class Scorer:
    """A model, its context and its changed copies.

    Attributes:
        context: what hypotheses may look at.
        watched: token ids that get entries of their own in every row.
        ends: the model's end tokens.
    """

    def __init__(self, folder: str, others: Sequence[str] = (), adapters: Sequence[str] = ()) -> None:
        """Raises StudyError where the model cannot be read; a missing tokenizer is said, and left out."""
        self.model = load_policy(folder).to(distributed.device()).eval().requires_grad_(False)
        self.model.set_attn_implementation(ALONE)
        try:
            tokenizer = load_tokenizer(folder)
        except ModelError as error:
            say(f"{error}; hypotheses on texts are left out")
            tokenizer = None
        template = chat_template(tokenizer)
        self.context = Context(self.model.config, tokenizer, tuple(others), tuple(adapters), template)
        self.ends = tuple(stop_tokens(local_folder(folder), tokenizer))
        self.watched: set[int] = {*getattr(tokenizer, "all_special_ids", ()), *self.ends}
        self._variants: dict[tuple[Choice, ...], PreTrainedModel | None] = {}

    @property
    def device(self) -> torch.device:
        return head_weight(self.model).device

    def variant(self, changes: tuple[Choice, ...]) -> PreTrainedModel | None:
        """The model under changes of weights or arithmetic, in their order; None where one does not apply."""
        if not changes:
            return self.model
        if changes not in self._variants:
            while len(self._variants) >= MOST_VARIANTS:
                self._variants.pop(next(iter(self._variants)))
            changed: PreTrainedModel | None = _copy(self.model)
            # A weight that is changed in place would be wrong for all that follows.
            versions = [weight._version for weight in self.model.parameters()]
            for choice in changes:
                changed = changed and choice.hypothesis.apply(changed, choice.value, self.context)
            if versions != [weight._version for weight in self.model.parameters()]:
                names = ", ".join(choice.hypothesis.name for choice in changes)
                raise ConfigurationError(
                    f"{names}: changes a weight in place, which the model shares; set weight.data instead"
                )
            if changed is not None and changed.config._attn_implementation != ALONE:
                changed.set_attn_implementation(ALONE)
            self._variants[changes] = changed
        return self._variants[changes]

    def inputs_of(self, inputs: Inputs, changes: tuple[Choice, ...]) -> Inputs | None:
        """What the model reads under changes of inputs; None where none of them changes this sequence."""
        found = inputs
        for choice in changes:
            found = choice.hypothesis.apply(found, choice.value, self.context) or found
        return None if changes and found is inputs else found

    @torch.no_grad()
    def rows(
        self,
        sequences: Sequence[Inputs],
        model_changes: tuple[Choice, ...] = (),
        input_changes: tuple[Choice, ...] = (),
        seen: Callable[[int], object] = int,
    ) -> Rows | None:
        """Reduced rows of all scored tokens, on the CPU; None where the changes apply to no sequence or not at all."""
        read = [self.inputs_of(inputs, input_changes) for inputs in sequences]
        if all(found is None for found in read):
            return None
        model = self.variant(model_changes)
        if model is None:
            return None
        parts = []
        in_16_bits = any(weight.dtype in HALVES for weight in model.parameters())
        with RoundedProducts() if in_16_bits else nullcontext():  # type: ignore[no-untyped-call]
            for inputs, found in zip(sequences, read, strict=True):
                parts.append(self._rows_of(model, found or inputs))
                seen(len(inputs.ids))
        return replace(Rows.joined(parts), ends=self.ends)

    def _rows_of(self, model: PreTrainedModel, inputs: Inputs) -> Rows:
        ids_P = torch.tensor(inputs.ids, device=self.device)
        if int(ids_P.max()) >= head_weight(model).shape[0] or int(ids_P.min()) < 0:
            raise DataError(f"the log has the token id {int(ids_P.max())}, which the model's vocabulary has not")
        positions = range(len(ids_P)) if inputs.positions is None else inputs.positions
        place_T = torch.from_numpy(np.asarray(inputs.place_T)).to(self.device)
        hidden_PH = model.base_model(
            input_ids=ids_P[None],
            position_ids=torch.tensor([list(positions)], device=self.device),
            use_cache=False,
            **({} if inputs.window is None else {"window": inputs.window}),
        ).last_hidden_state[0]
        head_VH = head_weight(model)
        if not getattr(model, LOGITS_TOO, False):
            hidden_PH, head_VH = hidden_PH.float(), head_VH.float()
        rounding = getattr(model, HEAD_INPUTS, None)
        if rounding is not None:
            hidden_PH = rounding(hidden_PH)
        parts = []
        for place_C in torch.split(place_T, CHUNK):
            logits_CV = (hidden_PH[place_C - 1] @ head_VH.T).float()
            parts.append(reduced(logits_CV, ids_P, place_C, inputs.first, self.watched).cpu())
        return Rows.joined(parts)


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with modules of its own, whose weights are the model's until they are replaced."""
    shared: dict[int, object] = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()
    }
    return copy.deepcopy(model, shared)


@torch.no_grad()
def logprobs_after(scorer: Scorer, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Log-probs of each response's tokens after one prompt, nats; the prompt is read once for all of them."""
    ids_RN = torch.zeros(len(responses), max(map(len, responses)), dtype=torch.int64)
    for row, ids in enumerate(responses):
        ids_RN[row, : len(ids)] = torch.tensor(ids)
    model, ids_RN = scorer.model, ids_RN.to(scorer.device)
    model.set_attn_implementation("sdpa")  # ours has no cache
    try:
        read = model.base_model(input_ids=torch.tensor([list(prompt)], device=scorer.device), use_cache=True)
        first_V = _logprobs(model, read.last_hidden_state[0, -1:])[0]
        logprob_RN = first_V[ids_RN]  # the first tokens' are right; the others' follow
        if ids_RN.shape[1] > 1:
            read.past_key_values.batch_repeat_interleave(len(responses))
            after = model.base_model(input_ids=ids_RN[:, :-1], past_key_values=read.past_key_values, use_cache=True)
            hidden_MH = after.last_hidden_state.flatten(0, 1)
            parts = [
                _logprobs(model, hidden_CH).gather(1, target_C[:, None])[:, 0]
                for hidden_CH, target_C in zip(
                    torch.split(hidden_MH, CHUNK), torch.split(ids_RN[:, 1:].flatten(), CHUNK), strict=True
                )
            ]
            logprob_RN[:, 1:] = torch.cat(parts).view(len(responses), -1)
    finally:
        model.set_attn_implementation(ALONE)
    return [logprob_N[: len(ids)].double().cpu().numpy() for logprob_N, ids in zip(logprob_RN, responses, strict=True)]


def _logprobs(model: PreTrainedModel, hidden_CH: torch.Tensor) -> torch.Tensor:
    """Log-probs of all tokens after each hidden state, nats [C, V]."""
    return (hidden_CH @ head_weight(model).T).float().log_softmax(-1)
