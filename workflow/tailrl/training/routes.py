"""The sampler's experts in the trainer: laid out for a packed row, replayed, and compared with the trainer's own."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.kernels.packing import Batch, pack_batch
from tailrl.model.routing import Routing, routed
from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import ModelError


def packed(rollouts: Sequence[Rollout], device: torch.device) -> tuple[Batch, Tensor | None]:
    """A micro-batch, and the sampler's experts for its row: int64 [L, P, K]; None where the rollouts have none.

    Responses share a prompt's tokens in the row if the sampler gave these the same experts too. Otherwise each has its
    own copy, so that every token of the row has the experts that its own response was sampled with.
    """
    prompts = [rollout.prompt_tokens for rollout in rollouts]
    responses = [rollout.tokens for rollout in rollouts]
    given = [rollout.routes_PLK for rollout in rollouts if rollout.routes_PLK is not None]
    if not given:
        return pack_batch(prompts, responses, device), None
    if len(given) < len(rollouts):
        raise ModelError(f"{len(rollouts) - len(given)} of {len(rollouts)} responses came without their experts")
    of_prompts = [routes[: len(prompt)] for routes, prompt in zip(given, prompts, strict=True)]
    marks = [prompt_mark(rollout) for rollout in rollouts]
    batch = pack_batch(prompts, responses, device, marks)
    firsts = dict(zip(zip(prompts, marks, strict=True), of_prompts, strict=True))  # the order of the row's prompts
    rest = [routes[len(prompt) :] for routes, prompt in zip(given, prompts, strict=True)]
    row_PLK = np.concatenate([*firsts.values(), *rest])
    return batch, torch.from_numpy(row_PLK.astype(np.int64)).permute(1, 0, 2).contiguous().to(device)


def prompt_mark(rollout: Rollout) -> Hashable:
    """What besides a prompt's tokens decides whether responses share them in a row: the prompt's experts, if given."""
    routes_PLK = rollout.routes_PLK
    return None if routes_PLK is None else routes_PLK[: len(rollout.prompt_tokens)].tobytes()


def check_routes(model: PreTrainedModel, given_LPK: Tensor) -> None:
    """Raises StudyError where the sampler's experts are not of this policy's shape."""
    sizes, found = routed(model.config), (given_LPK.shape[0], given_LPK.shape[2])
    if sizes is None:
        raise ModelError("the sampler gave experts, and the policy is no mixture of experts")
    if found != (sizes[0], sizes[2]) or int(given_LPK.max()) >= sizes[1]:
        raise ModelError(
            f"the sampler gave {found[1]} experts a token in {found[0]} layers, up to number {int(given_LPK.max())}; "
            f"the policy has {sizes[2]} of {sizes[1]} in {sizes[0]}"
        )


def flips(routing: Routing, given_LPK: Tensor, batch: Batch) -> Tensor:
    """Where the trainer's routers choose another set than the sampler's: bool [T, L].

    A response token's row is the one that predicts it. The order within a set does not count.
    """
    differ_LP = (routing.choices().sort(-1).values != given_LPK.sort(-1).values).any(-1)
    return differ_LP[:, batch.predict_T].T


def margins(routing: Routing, batch: Batch) -> Tensor:
    """The trainer's `Routing.margins` where each response token is predicted: float32 [T, L], nats."""
    return routing.margins()[:, batch.predict_T].T.float()


def as_bits(flips_TL: Tensor) -> Tensor:
    """The flips of each token as one int64, bit l for layer l; of more than 63 layers the first 63."""
    layers = min(flips_TL.shape[1], 63)
    return (flips_TL[:, :layers].long() << torch.arange(layers, device=flips_TL.device)).sum(1)
