"""Compares the experts that the trainer's routers choose with those that an engine chose, on the engine's responses."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.artifacts.probes import ExpertFlips
from tailrl.config.distributions import Distributions
from tailrl.kernels.packing import micro_batches
from tailrl.model.forward import hidden_states
from tailrl.model.routing import Routing
from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import ModelError
from tailrl.training.placement import tensor_floats
from tailrl.training.routes import check_routes, flips, margins, packed, prompt_mark


@torch.no_grad()
def compare_routes(model: PreTrainedModel, rollouts: Sequence[Rollout], settings: Distributions) -> ExpertFlips:
    """Flips and the trainer's margins at all tokens of the responses, in order.

    The trainer scores packed micro-batches as in training with routes, without replay: its layers use its own experts.

    Raises:
        StudyError: a response came without its experts, or they are not of this policy's shape.
    """
    device = next(model.parameters()).device
    prompts, lengths = [rollout.prompt_tokens for rollout in rollouts], [len(rollout.tokens) for rollout in rollouts]
    found: dict[int, tuple[Tensor, ...]] = {}
    for group in micro_batches(prompts, lengths, settings.token_budget, list(map(prompt_mark, rollouts))):
        batch, given_LPK = packed([rollouts[i] for i in group], device)
        if given_LPK is None:
            raise ModelError(f"distributions.engines.{settings.name}: responses came without their experts")
        check_routes(model, given_LPK)
        routing = Routing()
        with tensor_floats(settings.engine.sampler):
            hidden_states(model, batch.tokens_P, batch.packing, routing)
        both = flips(routing, given_LPK, batch), margins(routing, batch)
        parts = zip(*(torch.split(values_TL, list(batch.responses_N)) for values_TL in both), strict=True)
        found.update(zip(group, parts, strict=True))
    flips_TL, margins_TL = (torch.cat([found[i][part] for i in range(len(rollouts))]).cpu() for part in (0, 1))
    return ExpertFlips(flips_TL.numpy(), margins_TL.numpy())
