"""A mixture of experts in vLLM's worker: weights that reload right, a trial of them, and the experts of each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from tailrl.rollout.types import Request, Routes
from tailrl.rollout.vllm.processor import SafeSetProcessor
from tailrl.runtime.errors import ConfigurationError, ModelError

ROUNDINGS = 16
"""Accepted error of an expert's output, in roundings of the engine's dtype."""


def mixtures(model: nn.Module) -> list[Any]:
    """vLLM's layers of experts, in order."""
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def renew_kernels(model: nn.Module) -> None:
    """Let the next load of weights prepare each layer of experts as the first one does.

    vLLM 0.32 prepacks experts for a CPU at the first load alone. Later ones leave plain weights where the kernel reads
    packed ones, and outputs are wrong without a word. On a GPU nothing is packed, and graphs hold the kernel.
    """
    for layer in mixtures(model):
        if next(layer.parameters()).device.type == "cpu":
            layer._quant_method.moe_kernel = None


def probe_rows(experts: int, hidden: int) -> Tensor:
    """One row for each expert, float32 [E, H], about as large as a norm's output; always the same."""
    return torch.randn(experts, hidden, generator=torch.Generator().manual_seed(0))


def plain_experts(model: nn.Module) -> dict[str, Any]:
    """Modules of a transformers model that hold a layer's experts as two stacks of matrices [out, in], by name.

    Those with biases, and those that lay gate and up out in another way, are left out: they are not tried.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if all(getattr(getattr(module, part, None), "ndim", 0) == 3 for part in ("gate_up_proj", "down_proj"))
        and getattr(module, "is_concatenated", False)  # these three are how transformers says the layout
        and not (module.is_transposed or module.has_bias)
    }


class ExpectedExperts:
    """What each expert must give for its row of `probe_rows`, computed from the weights as they pass."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: of the family, which says which of its modules are experts and how they gate."""
        self.layers = plain_experts(model)
        self.inner: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}  # float32 [E, H], by layer

    def seen(self, name: str, weight: Tensor) -> Tensor:
        """The weight, in the engine's dtype and named as in the model, once it is taken in."""
        layer, _, part = name.rpartition(".")
        if layer in self.layers and part == "gate_up_proj":
            rows_EH1 = probe_rows(weight.shape[0], weight.shape[2]).to(weight)[..., None].float()
            gate_up_EI = torch.bmm(weight.float(), rows_EH1).squeeze(-1)
            self.inner[layer] = self.layers[layer]._apply_gate(gate_up_EI)
        elif layer in self.inner and part == "down_proj":  # weights that are missing are named elsewhere
            self.outputs[layer] = torch.bmm(weight.float(), self.inner.pop(layer)[..., None]).squeeze(-1)
        return weight

    def check(self, llm: Any, dtype: torch.dtype) -> None:
        """Raises StudyError where the engine's experts do not compute with these weights."""
        tried = llm.collective_rpc("tried_experts", args=(dtype,))[0] if self.outputs else []
        for layer, (expected_EH, tried_EH) in enumerate(zip(self.outputs.values(), tried, strict=bool(tried))):
            error, size = (tried_EH - expected_EH.cpu()).abs().max().item(), expected_EH.abs().max().item()
            if not error <= ROUNDINGS * torch.finfo(dtype).eps * size:
                raise ModelError(
                    f"vLLM's experts of layer {layer} do not compute with the weights that they were handed: their "
                    f"outputs, of size {size:.1g}, are off by {error:.1g}"
                )


def tried_experts(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """What each layer's experts give for `probe_rows`: float32 [E, H] a layer; none of those that cannot be asked."""
    found = []
    for layer in mixtures(model):
        # Several ranks have a part of each expert; Qwen3-MoE has no biases.
        method = layer._quant_method
        # A monolithic kernel, as Blackwell's, routes by itself.
        plain = isinstance(method, UnquantizedFusedMoEMethod) and not (
            layer.moe_config.has_bias or method.is_monolithic
        )
        if not plain or layer.moe_config.tp_size > 1:
            continue
        experts = layer.moe_config.num_experts
        expert_E = torch.arange(experts)
        # The first of its K experts has all the weight.
        ids_EK = (expert_E[:, None] + torch.arange(layer.router.top_k)) % experts
        weight_EK = (torch.arange(layer.router.top_k) == 0).float().expand(experts, -1).contiguous()
        rows_EH = probe_rows(experts, layer.moe_config.hidden_dim)
        like = next(layer.routed_experts.parameters())
        out_EH = method.apply(
            layer=layer.routed_experts,
            x=rows_EH.to(like.device, dtype),
            topk_weights=weight_EK.to(like.device),
            topk_ids=ids_EK.to(like.device, torch.int32),
            shared_experts=None,
            shared_experts_input=None,
        )
        found.append(out_EH.float().cpu())
    return found


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """Experts of X tokens that the engine ran; entry i is about position `position[i]` of request `request[i]`."""

    request: NDArray[np.int64]
    position: NDArray[np.int64]
    experts: Routes  # [X, L, K]: of L layers, K each

    def of(self, requests: Sequence[Request], responses: Sequence[int]) -> Iterator[Routes]:
        """The routes of each request, [prompt and response without its last token, L, K], in order.

        A token that vLLM ran again, of a preempted request, has its last experts. Raises StudyError for one without.
        """
        for number, (request, response) in enumerate(zip(requests, responses, strict=True)):
            own = self.request == number
            routes = np.zeros((len(request.prompt_tokens) + response - 1, *self.experts.shape[1:]), self.experts.dtype)
            seen = np.zeros(len(routes), bool)
            # One token more may have run, the last one, when a response ends at its limit.
            inside = own & (self.position < len(routes))
            routes[self.position[inside]] = self.experts[inside]
            seen[self.position[inside]] = True
            if not seen.all():
                raise ModelError(f"vLLM did not report the experts of {int((~seen).sum())} tokens of a response")
            yield routes


class RouteRecorder:
    """Follows the routers of vLLM's Model Runner V1; `rows` are its logits processor's, which know the requests."""

    def __init__(self, runner: Any, rows: Any) -> None:
        self.runner, self.rows = runner, rows
        layers = mixtures(runner.model)
        self.dtype = np.uint8 if all(layer.moe_config.num_experts <= 256 for layer in layers) else np.uint16
        self.steps: list[tuple[NDArray[np.int64], NDArray[np.int64], list[Routes]]] = []
        self.layers = len(layers)
        for index, layer in enumerate(layers):
            if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise RuntimeError("vLLM routes within its kernel here, and does not say how")
            layer.router.set_capture_fn(partial(self.capture, index))

    def capture(self, layer: int, ids_XK: Tensor) -> None:
        """Take in a layer's choice for the tokens of a step."""
        if layer == 0:
            self.steps.append((*self._tokens(), []))
        request, _, chosen = self.steps[-1]
        chosen.append(ids_XK[: len(request)].cpu().numpy().astype(self.dtype))

    def _tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The request and the position of each token of this step."""
        count = self.runner.input_batch.num_reqs
        lengths = np.diff(self.runner.query_start_loc.np[: count + 1])
        requests = [self.rows[index].request if index in self.rows else -1 for index in range(count)]
        position = self.runner.positions[: int(lengths.sum())].cpu().numpy().astype(np.int64)
        return np.repeat(np.array(requests, np.int64), lengths), position.copy()

    def take(self) -> RouteRecord:
        """Everything recorded since the last call."""
        steps, self.steps = self.steps, []
        return RouteRecord(
            np.concatenate([step[0] for step in steps]),
            np.concatenate([step[1] for step in steps]),
            np.concatenate([np.stack(step[2], 1) for step in steps]),
        )


class ExpertsExtension:
    """Methods added to vLLM's worker for a mixture of experts."""

    model_runner: Any
    route_recorder: RouteRecorder

    def tried_experts(self, dtype: torch.dtype) -> list[Tensor]:
        """See the function."""
        return tried_experts(self.model_runner.model, dtype)

    def record_routes(self) -> int:
        """Record the experts of every token from now on; returns in how many layers."""
        layers = len(mixtures(self.model_runner.model))
        if layers:
            processors = self.model_runner.input_batch.logitsprocs.argmax_invariant
            rows = next(processor.rows for processor in processors if isinstance(processor, SafeSetProcessor))
            self.route_recorder = RouteRecorder(self.model_runner, rows)
        return layers

    def take_route_record(self) -> RouteRecord:
        """The routes since the last call."""
        return self.route_recorder.take()


def check_routes_here(runner_v2: bool) -> None:
    """Raises StudyError where an engine on this machine could not say which experts it chose."""
    if runner_v2 or torch.cuda.is_available():
        raise ConfigurationError(
            "sampler.routes: the experts of vLLM's tokens are recorded on a CPU alone: leave it out"
        )


def check_shared(model: nn.Module, ranks: int) -> None:
    """Raises StudyError where ranks would share a mixture whose slices cannot be tried after a reload, as on CPUs."""
    if ranks > 1 and not torch.cuda.is_available() and any(weight.ndim == 3 for weight in model.parameters()):
        raise ConfigurationError(
            "sampler.tensor_parallel: ranks on CPUs do not share a mixture of experts, since a slice of an expert "
            "cannot be checked after a hand-over: leave it out"
        )


def record_routes(llm: Any, policy_folder: Path) -> bool:
    """Let the engine record routes, and return True; raises StudyError for a policy without experts."""
    if not all(llm.collective_rpc("record_routes")):
        raise ConfigurationError(f"sampler.routes: {policy_folder} is no mixture of experts: leave it out")
    return True
