"""Mistakes inside a model: wrong positions, and others that no rule of the diagnosis knows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout
from transformers import PreTrainedModel


def plant(model: PreTrainedModel, mistake: str, by: float, seed: int) -> None:
    """Makes a mistake of MISTAKES in a model, in place; `by`: its size."""
    torch.manual_seed(seed)
    MISTAKES[mistake](model.base_model, by)


def _rope(base: Any, by: float) -> None:
    """The frequencies of the rotary positions are multiplied."""
    base.rotary_emb.inv_freq.mul_(by)


def _depth(base: Any, by: float) -> None:
    """Positions after this one are half as far again from it."""

    def stretched(
        _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position = named["position_ids"] if "position_ids" in named else given[1]
        moved = torch.where(position > by, by + 1.5 * (position - by), position.float())
        if "position_ids" in named:
            return given, {**named, "position_ids": moved}
        return (given[0], moved, *given[2:]), named

    base.rotary_emb.register_forward_pre_hook(stretched, with_kwargs=True)


def _dropout(base: Any, by: float) -> None:
    """A share of every MLP's outputs is dropped."""
    for layer in base.layers:
        layer.mlp.register_forward_hook(lambda _m, _i, out: dropout(out, by))


def _attention(base: Any, by: float) -> None:
    """The scores of every attention are multiplied."""
    for layer in base.layers:
        layer.self_attn.scaling *= by


def _multiplied(module: nn.Module, by: float) -> None:
    module.register_forward_hook(lambda _m, _i, out: out * by)


def _eps(base: Any, by: float) -> None:
    """Every norm adds `by` to the mean square that it divides by."""
    for module in base.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = by


def _heads(base: Any, by: float) -> None:
    """The first `by` heads of the first layer come in reverse order."""
    attention, count = base.layers[0].self_attn, int(by)

    def swapped(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        heads = given[0].unflatten(-1, (-1, attention.head_dim))
        order = [*reversed(range(count)), *range(count, heads.shape[-2])]
        return heads[..., order, :].flatten(-2), *given[1:]

    attention.o_proj.register_forward_pre_hook(swapped)


def _gelu(base: Any, by: float) -> None:
    """The MLPs of the first `by` layers use GELU in place of SiLU."""
    for layer in base.layers[: int(by)]:
        getattr(layer.mlp, "experts", layer.mlp).act_fn = nn.GELU()


def _dropped(base: Any, by: float) -> None:
    """The attention of the layer of this number adds nothing; −1: of the last."""
    _multiplied(base.layers[int(by)].self_attn.o_proj, 0.0)


def _skipped(base: Any, by: float) -> None:
    """The layer of this number adds nothing."""
    _dropped(base, by)
    _multiplied(base.layers[int(by)].mlp, 0.0)


def _swapped(base: Any, by: float) -> None:
    """The MLPs of the first `by` layers take their gate for their upward projection, and the reverse."""
    for layer in base.layers[: int(by)]:
        if hasattr(layer.mlp, "experts"):
            gate, up = layer.mlp.experts.gate_up_proj.chunk(2, 1)
            layer.mlp.experts.gate_up_proj = nn.Parameter(torch.cat([up, gate], 1), requires_grad=False)
        else:
            layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def _keys(base: Any, by: float) -> None:
    """In the layer of this number every head gets the keys of the head before it."""
    attention = base.layers[int(by)].self_attn
    attention.k_proj.register_forward_hook(lambda _m, _i, out: out.roll(attention.head_dim, -1))


def _norm(base: Any, by: float) -> None:
    """The weight of the norm before this layer's MLP is read as 1 + weight."""
    base.layers[int(by)].post_attention_layernorm.register_forward_hook(lambda m, _i, out: out + out / m.weight)


def _tokens(base: Any, by: float) -> None:
    """A share of the token ids is read as the next id."""
    read_V = torch.arange(base.embed_tokens.num_embeddings)
    read_V = torch.where(torch.rand(len(read_V)) < by, (read_V + 1) % len(read_V), read_V)
    base.embed_tokens.register_forward_pre_hook(lambda _m, given: (read_V[given[0]], *given[1:]))


def _shard(base: Any, by: float) -> None:
    """In the first `by` layers the last head adds nothing, as where the sum over two ranks lacks a part."""

    def cut(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = torch.arange(given[0].shape[-1]) < given[0].shape[-1] - size
        return given[0] * kept, *given[1:]

    size = base.layers[0].self_attn.head_dim
    for layer in base.layers[: int(by)]:
        layer.self_attn.o_proj.register_forward_pre_hook(cut)


MISTAKES: dict[str, Callable[[Any, float], None]] = {
    "rope": _rope,
    "depth": _depth,
    "dropout": _dropout,
    "attention": _attention,
    "layer": lambda base, by: _multiplied(base.layers[len(base.layers) // 2].mlp, by),
    "values": lambda base, by: _multiplied(base.layers[0].self_attn.v_proj, by),
    "embedding": lambda base, by: _multiplied(base.embed_tokens, by),
    "eps": _eps,
    "heads": _heads,
    "gelu": _gelu,
    "dropped": _dropped,
    "skipped": _skipped,
    "swapped": _swapped,
    "keys": _keys,
    "norm": _norm,
    "tokens": _tokens,
    "shard": _shard,
}
"""By name: each takes a model without its head, and a size. layer, values, embedding: the outputs of the middle MLP, of
the first layer's values, of the embedding are multiplied."""
