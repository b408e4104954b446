"""The trainer's forward: a causal language model that scores tokens under its own constrained distribution."""

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrl.kernels.logprobs import constrained_logprobs

NOT_SCORED = -1


def score_constrained(model: PreTrainedModel, log_rho: float, temperature: float) -> None:
    """Give the model's forward an argument `scored_NC`, with which it returns log-probs instead of logits.

    Changing the forward itself lets wrappers of the model (autocast, DDP, FSDP, DeepSpeed, PEFT's adapters) run as for
    any other loss. The head scores in a forward of its own: where its weight is sharded, it is whole only there.

    Args:
        model: a causal language model, the one inside where PEFT wraps it; changed in place. A call without the
            argument works as before.
        log_rho: ln ρ of min-p.
        temperature: divides the logits before min-p.
    """
    head = model.get_output_embeddings()
    plain, plain_head = model.forward, head.forward

    # `generate` checks its arguments against the signature of the model's own forward.
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, scored_NC: Tensor | None = None, **kwargs: Any) -> Any:
        """The model's own forward; with int64 `scored_NC`, the fields of `TokenLogprobs` for T scored tokens.

        `scored_NC` has the last C tokens of each row, or `NOT_SCORED`; the T tokens are in row order.
        """
        if scored_NC is None:
            return plain(*args, **kwargs)
        # PEFT's wrapper names every argument, also those that it was not given.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        hidden_NLH = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        scored_mask_NC = scored_NC != NOT_SCORED
        hidden_TH = hidden_NLH[:, -scored_NC.shape[1] - 1 : -1][scored_mask_NC]
        return self.get_output_embeddings()(hidden_TH, scored_T=scored_NC[scored_mask_NC])

    @functools.wraps(type(head).forward)
    def head_forward(self: nn.Linear, hidden: Tensor, scored_T: Tensor | None = None) -> Any:
        """The head's own forward; with int64 `scored_T`, the fields of `TokenLogprobs` from hidden states [T, H]."""
        if scored_T is None:
            return plain_head(hidden)
        # Logits in float32, whatever the backbone computes in.
        with torch.autocast(hidden.device.type, enabled=False):
            found = constrained_logprobs(hidden, self.weight, scored_T, "min_p", log_rho, temperature)
        return tuple(getattr(found, name) for name in found.__slots__)

    model.forward = types.MethodType(forward, model)
    head.forward = types.MethodType(head_forward, head)


def language_model(model: Any) -> PreTrainedModel:
    """The transformers model itself: inside of PEFT's wrapper, whose adapters are modules of it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model
