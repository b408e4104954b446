"""The policy's forward on packed rows: hidden states, then the head, with ordinary or batch-invariant operators."""

from types import MethodType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from tailrl.kernels import batch_invariant
from tailrl.kernels.batch_invariant import Attend, PackedAttention, pad_rows
from tailrl.kernels.packing import Packing, padded, unpadded
from tailrl.kernels.varlen import HEAD_MULTIPLE, serves, varlen_attention
from tailrl.model.routing import Routing, open_routers
from tailrl.runtime.errors import ModelError

PACKED_ATTENTION = "packed"
EXACT_ATTENTION = "exact"
CACHE_ROUNDING, QUERY_ROUNDING = "cache_rounding", "query_rounding"
"""The attributes of an attention module with the rounding of its keys and values, and of its queries, if it has one."""


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of transformers' interface; the packing replaces it
    *,
    scaling: float,
    packing: Packing,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row: [1, heads, P, d] → [1, P, heads, d]."""
    _refuse_unsupported(others)
    _refuse_beyond(others.get("sliding_window"), packing)
    query, key, value = _rounded(module, query, key, value)
    if serves(query):
        query_PHD, key_PKD, value_PKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return varlen_attention(query_PHD, key_PKD, value_PKD, packing.segments, scaling).unsqueeze(0), None
    query_NHLD, key_NHLD, value_NHLD = (
        padded(tensor[0].transpose(0, 1).flatten(1), packing)
        .view(*packing.index_NL.shape, tensor.shape[1], tensor.shape[3])
        .transpose(1, 2)
        for tensor in (query, key, value)
    )
    out_NHLD = padded_attention(query_NHLD, key_NHLD, value_NHLD, scaling)
    out_PD = unpadded(out_NHLD.transpose(1, 2).flatten(2), packing)
    return out_PD.view(1, -1, query.shape[1], query.shape[3]), None


def padded_attention(query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, scaling: float) -> Tensor:
    """Causal attention of padded sequences: [N, H, L, D].

    On a GPU, where it serves float32, PyTorch has one kernel for that whose memory grows with L, and it takes no
    grouped heads: they are repeated. PyTorch's own choice for them is the definition, whose memory grows with L².

    Raises:
        StudyError: no kernel of the GPU takes these numbers.
    """
    grouped = query_NHLD.shape[1] != key_NKLD.shape[1]
    if not query_NHLD.is_cuda:
        return scaled_dot_product_attention(
            query_NHLD, key_NKLD, value_NKLD, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    size, group = query_NHLD.shape[-1], query_NHLD.shape[1] // key_NKLD.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) if grouped else tensor for tensor in (key_NKLD, value_NKLD))
    if missing := -size % HEAD_MULTIPLE:
        query_NHLD, keys, values = (pad(tensor, (0, missing)) for tensor in (query_NHLD, keys, values))
    try:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out_NHLD = scaled_dot_product_attention(query_NHLD, keys, values, is_causal=True, scale=scaling)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
            raise
        raise ModelError(
            f"this GPU has no attention in {str(query_NHLD.dtype).removeprefix('torch.')} with heads of {size} whose "
            "memory grows with a response's length alone; set training.dtype: float32, or take a newer GPU"
        ) from None
    return out_NHLD[..., :size]


def _exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of transformers' interface; the caller's attention replaces it
    *,
    scaling: float,
    attend: Attend,
    **others: Any,
) -> tuple[Tensor, None]:
    """The caller's attention `attend` over one row: [1, heads, P, d] → [1, P, heads, d]."""
    _refuse_unsupported(others)
    query, key, value = _rounded(module, query, key, value)
    query_PHD, key_PKD, value_PKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(cast(int, module.layer_idx), query_PHD, key_PKD, value_PKD, scaling).unsqueeze(0), None


def _rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The query as the module's attention takes it, key and value as its cache holds them."""
    of_query, of_cache = (getattr(module, name, lambda states: states) for name in (QUERY_ROUNDING, CACHE_ROUNDING))
    return of_query(query), of_cache(key), of_cache(value)


def _refuse_unsupported(others: dict[str, Any]) -> None:
    unsupported = [name for name in ("softcap", "s_aux") if others.get(name) is not None]
    if unsupported:
        raise ModelError(
            f"the policy's attention uses {', '.join(unsupported)}, which packed training does not support"
        )


def _refuse_beyond(window: int | None, packing: Packing) -> None:
    """Raises StudyError for a sequence longer than the attention's window, which hides nothing from a shorter one."""
    longest = packing.index_NL.shape[1]
    if window is not None and longest > window:
        raise ModelError(
            f"a sequence has {longest} tokens, and the policy's attention has a sliding_window of {window}, the most "
            "that packed training supports"
        )


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
AttentionInterface.register(EXACT_ATTENTION, _exact_attention)


def changing_ropes(config: PreTrainedConfig) -> dict[str, int]:
    """Types of rope whose frequencies depend on a sequence's length, with the tokens up to which they do not.

    Such ropes take their frequencies from the longest sequence of a forward. One that is longer than this limit would
    change all others in its row. vLLM decides once for all, by its own `max_model_len`.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = [rope for rope in parameters.values() if isinstance(rope, dict)] or [parameters]  # one a type of layer
    limits = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    types = {str(rope.get("rope_type")): rope for rope in ropes if rope.get("rope_type") in limits}
    return {name: rope.get(limits[name], config.max_position_embeddings) for name, rope in types.items()}


def check_rope(config: PreTrainedConfig, tokens: int) -> None:
    """Raises StudyError for a sequence of so many tokens that its rope would change others: see `changing_ropes`."""
    for rope, limit in changing_ropes(config).items():
        if tokens > limit:
            raise ModelError(
                f"the policy's rope of type {rope} changes at {limit} tokens, and a sequence of {tokens} would change "
                f"all others in its row: prompt and response may have {limit} tokens"
            )


def hidden_states(model: PreTrainedModel, tokens_P: Tensor, packing: Packing, routing: Routing | None = None) -> Tensor:
    """Last hidden states [P, H] of a packed row of token ids [P]; the caller applies the head.

    `routing` prescribes and records the experts of a mixture. Raises StudyError for a sequence so long that its rope
    would change the others in the row.
    """
    check_rope(model.config, packing.index_NL.shape[1])
    routes: dict[str, Any] = {} if routing is None else {"routing": routing}
    if model.config._attn_implementation == EXACT_ATTENTION:
        _refuse_beyond(sliding_window(model.config), packing)
        attention = PackedAttention.of(packing, key_group(model.config))
        row = pad_rows(tokens_P), pad_rows(packing.positions_P)
        return exact_hidden_states(model, *row, attention.attend, **routes)[: len(tokens_P)]
    output = model.base_model(
        input_ids=tokens_P.unsqueeze(0),
        position_ids=packing.positions_P.unsqueeze(0),
        use_cache=False,
        packing=packing,
        **routes,
    )
    return cast(Tensor, output.last_hidden_state[0])


def make_exact(model: PreTrainedModel) -> None:
    """Make the model batch-invariant: a token's hidden states no longer depend on other sequences in its row."""
    model.set_attn_implementation(EXACT_ATTENTION)
    open_routers(model, exact=True)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_exact_linear, module)  # type: ignore[method-assign]


def _exact_linear(module: nn.Linear, rows: Tensor) -> Tensor:
    """[..., I] → [..., O]; a model's row has a leading dimension of 1, which a layer may drop."""
    flat_RO = batch_invariant.product(rows.flatten(0, -2), module.weight, module.bias)
    return flat_RO.view(*rows.shape[:-1], -1)


def exact_hidden_states(
    model: PreTrainedModel, tokens_R: Tensor, positions_R: Tensor, attend: Attend, **routes: Routing
) -> Tensor:
    """Last hidden states [R, H] of a row of tokens that only `attend` connects.

    The model needs `make_exact` before, and the row is padded to a multiple of `row_multiple`.
    """
    output = model.base_model(
        input_ids=tokens_R.unsqueeze(0), position_ids=positions_R.unsqueeze(0), use_cache=False, attend=attend, **routes
    )
    return cast(Tensor, output.last_hidden_state[0])


def row_multiple(model: PreTrainedModel) -> int:
    """`batch_invariant.row_multiple` for every width at which the model computes, logits included."""
    return batch_invariant.row_multiple(
        {head_size(model.config), *(size for p in model.parameters() for size in p.shape)}
    )


def head_size(config: PreTrainedConfig) -> int:
    """Size of a key."""
    return cast(int, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Tokens that an attention layer looks back over, its own token among them; None where it looks at all of them."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds and "sliding_attention" not in kinds else getattr(config, "sliding_window", None)


def trained_length(config: PreTrainedConfig) -> int:
    """Most tokens of a sequence in packed rows: the policy's positions, its attention's window, its rope's limit."""
    positions = cast(int, config.max_position_embeddings)
    return min([positions, sliding_window(config) or positions, *changing_ropes(config).values()])


def key_heads(config: PreTrainedConfig) -> int:
    """Key heads; families without grouped queries have no number of their own for them."""
    return cast(int, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def key_group(config: PreTrainedConfig) -> int:
    """Query heads that share a key head."""
    return cast(int, config.num_attention_heads) // key_heads(config)


def head_weight(model: PreTrainedModel) -> Tensor:
    """The head's weight [V, H]; raises StudyError for a head with a bias, which the objective does not support."""
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__} has an output bias, which the constrained objective does not support")
    return cast(Tensor, head.weight)
