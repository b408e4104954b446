"""Outputs of the parts of a model's layers, for transformers' models and vLLM's."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PARTS = {"attention": re.compile(r"(self_)?attn$|attention$"), "feed-forward": re.compile(r"mlp$|feed_forward$")}

Outputs = dict[str, Tensor]
"""Float32 [P, H] by name, such as "layer 3, attention": all tokens that ran, in order."""


@contextmanager
def recorded(model: nn.Module) -> Iterator[Outputs]:
    """Outputs of the embeddings, of each layer and of its parts, of all that the model runs within the block."""
    found: Outputs = {}
    handles = [module.register_forward_hook(_keeping(name, found)) for name, module in _watched(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are watched, each with its name, by their order in the model."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding) or _is_embedding(module)]
    if embeddings:
        yield "embeddings", embeddings[0]
    layers = _layers(model)
    for number, layer in enumerate(layers):
        for child_name, child in layer.named_children():
            for part, pattern in PARTS.items():
                if pattern.search(child_name):
                    yield f"layer {number}, {part}", child
        yield f"layer {number}", layer


def _is_embedding(module: nn.Module) -> bool:
    return type(module).__name__ == "VocabParallelEmbedding"  # vLLM's


def _layers(model: nn.Module) -> list[nn.Module]:
    """The outermost list of modules: the decoder's layers."""
    return next((list(module) for module in model.modules() if isinstance(module, nn.ModuleList)), [])


def _keeping(name: str, found: Outputs) -> Callable[[nn.Module, object, object], None]:
    def hook(_: nn.Module, __: object, output: object) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        tensors = [one for one in parts if isinstance(one, Tensor)]
        first = tensors[0]
        # vLLM's layers return what they add and the residual stream apart.
        is_apart = "," not in name and len(tensors) == 2 and tensors[1].shape == first.shape
        whole = first.float() + tensors[1].float() if is_apart else first.float()
        rows_PH = whole.reshape(-1, whole.shape[-1]).detach().cpu()
        found[name] = torch.cat([found[name], rows_PH]) if name in found else rows_PH.clone()

    return hook
