"""A mixture of experts (Qwen3-MoE): which experts each token gets, seen and, for routing replay, prescribed.

Routing replay (R3, arXiv 2510.11370): the trainer uses the experts that the sampler chose. The router's weights are the
trainer's own: its softmax, renormalised over the prescribed experts. So the router still gets a gradient.
"""

from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from tailrl.kernels.batch_invariant import product
from tailrl.kernels.experts import exact_experts

EXACT_EXPERTS = "exact"

ALL_EXPERTS_FUNCTIONS.register(EXACT_EXPERTS, exact_experts)


class Routing:
    """What the routers of one forward over P tokens did, and what they are to do.

    A layer that is computed again in the backward does the same again. No dataclass, since FSDP copies those.

    Attributes:
        given_LPK: int64, the experts that each layer uses; None: the router's own.
        chosen: int64 [P, K], the router's own choice, by layer.
        logits: [P, E], the router's logits, by layer.
    """

    def __init__(self, given_LPK: Tensor | None = None) -> None:
        self.given_LPK = given_LPK
        self.chosen: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}

    def choices(self) -> Tensor:
        """The routers' own choices, int64 [L, P, K]."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)])

    def margins(self) -> Tensor:
        """How close each router is to another choice: [L, P], nats; infinite where a token gets every expert.

        The logit of the last chosen expert minus that of the first not chosen: the log of the ratio of their
        probabilities. A router's choice changes only where an error of its logits exceeds that.
        """
        logits_LPE = torch.stack([self.logits[layer] for layer in sorted(self.logits)])
        count, experts = self.choices().shape[-1], logits_LPE.shape[-1]
        if count == experts:
            return logits_LPE.new_full(logits_LPE.shape[:-1], torch.inf)
        ordered_LPK = logits_LPE.topk(count + 1, -1).values
        return ordered_LPK[..., -2] - ordered_LPK[..., -1]

    def load_balancing(self, experts_per_token: int) -> Tensor:
        """The load-balancing loss of Switch (arXiv 2101.03961), mean over layers.

        E Σ_e f_e P_e, with f_e the tokens of expert e per token and P_e its mean probability. It is K where all experts
        get the same.
        """
        each = [load_balancing_loss_func((own,), own.shape[1], experts_per_token) for own in self.logits.values()]
        return torch.stack(cast(list[Tensor], each)).mean()


def routers(model: PreTrainedModel) -> dict[int, Qwen3MoeTopKRouter]:
    """The routers of a mixture by layer; none for a dense model or a family that is not known here."""
    layers = getattr(model.base_model, "layers", ())
    gates = {number: getattr(getattr(layer, "mlp", None), "gate", None) for number, layer in enumerate(layers)}
    return {number: gate for number, gate in gates.items() if isinstance(gate, Qwen3MoeTopKRouter)}


def routed(config: PreTrainedConfig) -> tuple[int, int, int] | None:
    """Layers with experts, experts of a layer, experts of a token; None for what has no routers known here."""
    if config.model_type != "qwen3_moe":
        return None
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    layers = [n for n in range(config.num_hidden_layers) if n not in dense and (n + 1) % step == 0]
    return len(layers), config.num_experts, config.num_experts_per_tok


def open_routers(model: PreTrainedModel, exact: bool = False) -> None:
    """Let the routers follow and record a `Routing`, the keyword `routing` of the model's forward.

    Args:
        model: a dense one stays as it is.
        exact: with batch-invariant routers and experts.
    """
    if exact and (gates := routers(model)):
        model.set_experts_implementation(EXACT_EXPERTS)
        for gate in gates.values():
            gate.exact = True
    for index, (number, gate) in enumerate(routers(model).items()):
        if hasattr(gate, "routing"):
            continue
        gate.routing, gate.exact = None, exact
        gate.forward = MethodType(partial(_route, index), gate)
        layer = model.base_model.layers[number]
        # Inside the layer's forward, so that a layer that is computed again has its routing.
        layer.forward = partial(_with_routing, layer.forward, gate)


def _with_routing(forward: Any, gate: Any, *given: Any, routing: Routing | None = None, **named: Any) -> Tensor:
    gate.routing = routing
    try:
        return cast(Tensor, forward(*given, **named))
    finally:
        gate.routing = None


def _route(index: int, gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [P, E], weights [P, K] and experts [P, K] of the index-th router: `Qwen3MoeTopKRouter.forward`, which may
    be told the experts."""
    rows_PH = hidden.reshape(-1, gate.hidden_dim)
    logits_PE = product(rows_PH, gate.weight) if gate.exact else linear(rows_PH, gate.weight)
    probs_PE = logits_PE.softmax(-1, dtype=torch.float32)
    chosen_PK = probs_PE.topk(gate.top_k, -1).indices
    routing: Routing | None = gate.routing
    if routing is not None:
        routing.chosen[index], routing.logits[index] = chosen_PK, logits_PE
        if routing.given_LPK is not None:
            chosen_PK = routing.given_LPK[index]
    weight_PK = probs_PE.gather(-1, chosen_PK)
    if gate.norm_topk_prob:
        weight_PK = weight_PK / weight_PK.sum(-1, keepdim=True)
    return logits_PE, weight_PK.to(logits_PE.dtype), chosen_PK
