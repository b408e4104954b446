"""The twin of a quantised engine: what it rounds, what it leaves, its gradient, and which models it refuses."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from exact_fixture import CONFIGS
from step_fixture import make_rollouts, run_of, samples_of
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, Qwen3MoeConfig

from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.batch_invariant import PackedAttention
from tailrl.kernels.packing import pack, pack_batch
from tailrl.model import forward
from tailrl.model.forward import PACKED_ATTENTION, head_weight, hidden_states
from tailrl.model.policy import named_weights
from tailrl.model.quantize import CACHES, rounded_cache, rounded_rows
from tailrl.model.quantized import (
    check_cache,
    check_sizes,
    match_engine,
    projections,
    round_activations,
    rounded_weights,
)
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.training import loop
from tailrl.training.step import Job, update
from tailrl.training.stopwatch import Stopwatch

INT4 = SamplerSettings(quantization="int4", group_size=32)


def settings_of(**given: Any) -> SamplerSettings:
    return SamplerSettings.model_validate({"engine": "exact", "dtype": "float32", **given})


def by_loops(weight_OI: Tensor, group: int) -> Tensor:
    """int4, number by number in float64; scales as bfloat16 has them."""
    found = weight_OI.double().clone()
    for row in found:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            scale = float(torch.tensor(max(abs(float(x)) for x in part) / 7, dtype=torch.float32).bfloat16())
            part[:] = torch.tensor([min(7, max(-8, round(float(x) / scale))) * scale for x in part])
    return found


def test_linear_layers_but_the_head_are_quantised(model: PreTrainedModel) -> None:
    names = projections(model)
    assert {name.split(".")[-2] for name in names} == {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    assert len(names) == 7 * model.config.num_hidden_layers
    for name, weight in rounded_weights(named_weights(model), names, INT4):
        own = model.state_dict()[name]
        assert torch.equal(weight, own) != (name in names)
        if name in names:
            torch.testing.assert_close(weight.double(), by_loops(own, 32), rtol=1e-6, atol=0)
    untouched = rounded_weights(named_weights(model), names, settings_of(kv_cache_dtype="fp8_e4m3"))
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in untouched)


EXACT = {"engine": "exact", "dtype": "float32"}


@pytest.mark.parametrize(
    ("engine", "dial"),
    [(EXACT, {}), (EXACT, {"staleness": 1, "side": "both"}), ({"quantized_trainer": True}, {})],
    ids=["now", "old weights", "beside vLLM"],
)
def test_the_gradient_is_that_at_the_quantised_weights(
    model: PreTrainedModel, engine: dict[str, Any], dial: dict[str, Any]
) -> None:
    """A step of SGD on the masters, against a float64 model whose weights a loop quantised."""
    sampler = {"quantization": "int4", "group_size": 32, **engine}
    run = run_of({"sampler": sampler, "disturbance": dial}, max_grad_norm=1e9)
    rollouts, advantages = make_rollouts()
    samples = samples_of(rollouts, advantages, run)
    masters = {name: weight.clone() for name, weight in named_weights(model)}
    exact = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), dtype=torch.float64, attn_implementation="eager"
    )
    names = projections(model)
    exact.load_state_dict({n: by_loops(w, 32) if n in names else w.double() for n, w in masters.items()})
    loss = torch.tensor(0.0, dtype=torch.float64)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        tokens = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
        logp_TV = (exact(input_ids=tokens).logits[0] / run.training.temperature).log_softmax(-1)
        first = len(rollout.prompt_tokens)
        logp_T = logp_TV[first - 1 : -1].gather(-1, tokens[0, first:, None])
        loss = loss - advantage * logp_T.sum() / len(rollouts)
    loss.backward()
    if run.sampler.exact:
        match_engine(model, run.sampler)
    if dial:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update(model, optimizer, samples, run, 0, Stopwatch(), list(masters.items()) if dial else None)
    for (name, parameter), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert wanted.grad is not None
        # The difference of two numbers near 1, as the norms' weights are, has the rounding of float32 there.
        torch.testing.assert_close(before[name] - parameter, wanted.grad.float(), rtol=1e-3, atol=3e-6, msg=name)


def test_a_run_rounds_activations_of_a_quantised_trainer_on_one_rank(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM of int8 has them rounded with its own trainer, and not with another one."""
    model.save_pretrained(tmp_path)
    hooks = []
    for quantized_trainer in (True, False):
        run = run_of({"sampler": {"quantization": "int8", "quantized_trainer": quantized_trainer}})
        loaded = loop._load(cast(Job, SimpleNamespace(run=run, seed=0)), tmp_path)
        hooks.append(len(loaded.base_model.layers[0].mlp.up_proj._forward_pre_hooks))
    assert hooks == [1, 0]
    monkeypatch.setattr(distributed, "count", lambda: 2)
    run = run_of({"sampler": {"quantization": "int8", "quantized_trainer": True}})
    with pytest.raises(StudyError, match="few bits needs the whole policy: run it with 1 rank"):
        loop._load(cast(Job, SimpleNamespace(run=run, seed=0)), tmp_path)


def test_activations_are_rounded_and_their_gradient_goes_through(model: PreTrainedModel) -> None:
    layer: Any = model.base_model.layers[0].mlp.up_proj
    round_activations(model, settings_of(quantization="int8"))
    rows = torch.randn(3, 64, requires_grad=True)
    out = layer(rows)
    assert torch.equal(out, rounded_rows(rows, "int8").detach() @ layer.weight.T)
    out.sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, layer.weight.sum(0).expand(3, -1))
    torch.testing.assert_close(layer.weight.grad, rounded_rows(rows, "int8").detach().sum(0).expand(96, -1))
    head = torch.randn(2, 64)
    assert torch.equal(model.get_output_embeddings()(head), head @ head_weight(model).T)


@pytest.mark.parametrize("exact", [False, True], ids=["packed", "exact"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_keys_and_values_are_rounded(model: PreTrainedModel, kind: str, exact: bool) -> None:
    """With one token attention returns its value: that of the cache."""
    settings = settings_of(kv_cache_dtype=kind)
    if exact:
        match_engine(model, settings)
    else:
        round_activations(model, settings)
    layer: Any = model.base_model.layers[0].self_attn
    seen: list[Tensor] = []
    layer.v_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
    layer.o_proj.register_forward_pre_hook(lambda _m, given: seen.append(given[0]))
    batch = pack_batch([(5,)], [[7]])
    hidden_states(model, batch.tokens_P, batch.packing)
    value, out = (tensor.flatten(0, -2)[0] for tensor in seen)
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
    expected = rounded_cache(value, dtype, toward_zero=not torch.cuda.is_available())
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(out, value, rtol=1e-3)


@pytest.mark.parametrize(
    ("capability", "cache", "rounds"),
    [
        (None, "fp8_e4m3", False),
        ((8, 9), "fp8_e4m3", False),
        ((9, 0), "fp8_e4m3", True),
        ((9, 0), "fp8_e5m2", False),
        ((10, 0), "fp8_e4m3", False),
    ],
)
def test_a_matched_control_rounds_queries_where_vllm_does(
    model: PreTrainedModel,
    capability: tuple[int, int] | None,
    cache: str,
    rounds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    match_engine(model, settings_of(kv_cache_dtype=cache))
    assert hasattr(model.base_model.layers[0].self_attn, forward.QUERY_ROUNDING) is rounds


@pytest.mark.parametrize("queries", [False, True])
def test_queries_are_rounded_where_the_engine_does(
    model: PreTrainedModel, queries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that attention gets, after their rotation; the gradient goes through."""
    seen: list[Tensor] = []
    usual = forward.padded_attention

    def attention(query: Tensor, *rest: Any) -> Tensor:
        seen.append(query)
        return usual(query, *rest)

    monkeypatch.setattr(forward, "padded_attention", attention)
    round_activations(model, settings_of(kv_cache_dtype="fp8_e4m3"), queries)
    batch = pack_batch([(5, 6)], [[7, 8]])
    hidden_states(model, batch.tokens_P, batch.packing).sum().backward()
    query = seen[0].detach()
    assert torch.equal(query, query.to(torch.float8_e4m3fn).to(query.dtype)) == queries
    gradient = model.base_model.layers[0].self_attn.q_proj.weight.grad
    assert gradient is not None and gradient.abs().max() > 0


def toward_zero(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Of all numbers of a float8 the nearest that is not larger, from the table of them."""
    every = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()]
    return numbers.sign() * every[torch.searchsorted(every, numbers.abs().contiguous(), right=True) - 1]


def attention_gradient(taken: list[Tensor], output_PHD: Tensor, lengths: list[int], scaling: float) -> list[Tensor]:
    """By query [P, H, D], key and value [P, K, D]; `output_PHD` is that by the output. Query by query, in float64."""
    query_PHD, key_PKD, value_PKD = taken
    of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in taken)
    for first, length in zip((0, *lengths), lengths, strict=False):
        for place in range(first, first + length):
            past = slice(first, place + 1)
            for head in range(query_PHD.shape[1]):
                shared = head * key_PKD.shape[1] // query_PHD.shape[1]
                probs = (scaling * key_PKD[past, shared] @ query_PHD[place, head]).softmax(0)
                of_probs = value_PKD[past, shared] @ output_PHD[place, head]
                of_scores = scaling * probs * (of_probs - probs @ of_probs)
                of_query[place, head] += of_scores @ key_PKD[past, shared]
                of_key[past, shared] += of_scores[:, None] * query_PHD[place, head]
                of_value[past, shared] += probs[:, None] * output_PHD[place, head]
    return [of_query, of_key, of_value]


@pytest.mark.parametrize("exact", [False, True], ids=["packed", "exact"])
@pytest.mark.parametrize("queries", [False, True], ids=["keys and values", "queries too"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_the_gradient_of_attention_is_that_at_the_rounded_numbers(
    kind: str, queries: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of two sequences with grouped heads; what the format cannot hold gets its gradient too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    generator, lengths, scaling = torch.Generator().manual_seed(3), [3, 5], 0.3
    query, key, value, weight = (torch.randn(8, heads, 8, generator=generator).double() for heads in (4, 2, 2, 4))
    value[1, 0, 0] = 1e5
    given = [query.requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    round_activations(module, settings_of(kv_cache_dtype=kind), queries)
    packing = pack(lengths)
    states = [tensor.transpose(0, 1)[None] for tensor in given]
    if exact:
        attend = PackedAttention.of(packing, 2).attend
        out, _ = forward._exact_attention(module, *states, None, scaling=scaling, attend=attend)
    else:
        out, _ = forward._packed_attention(module, *states, None, scaling=scaling, packing=packing)
    (out[0] * weight).sum().backward()
    plain = [tensor.detach() for tensor in given]
    rounded = [toward_zero(tensor, CACHES[kind]) for tensor in plain]
    wanted = attention_gradient([*(rounded if queries else plain)[:1], *rounded[1:]], weight, lengths, scaling)
    elsewhere = attention_gradient(plain, weight, lengths, scaling)
    for tensor, expected, other in zip(given, wanted, elsewhere, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-9, atol=1e-12)
        assert (expected - other).abs().max() > 0.01 * expected.abs().max()


REFUSED = {
    "experts": (
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_experts=2, num_experts_per_tok=1,
        ),
        {"quantization": "int8"}, "is not the weight of a linear layer, as experts' are not",
    ),
    "convolutions": (
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=1), {"quantization": "int8"},
        "c_attn.weight is not the weight of a linear layer",
    ),
    "sizes": (
        CONFIGS["llama"].__class__(**{**CONFIGS["llama"].to_dict(), "intermediate_size": 80}),
        {"quantization": "int4", "group_size": 32}, "mlp.gate_proj.weight has 80 outputs and 96 inputs in groups of 32",
    ),
    "groups": (
        CONFIGS["llama"], {"quantization": "int4", "group_size": 64}, "has 96 outputs and 96 inputs in groups of 64"
    ),
    "heads": (
        CONFIGS["llama"].__class__(**{**CONFIGS["llama"].to_dict(), "head_dim": 48}),
        {"kv_cache_dtype": "fp8_e4m3"}, "takes heads of a multiple of 32, not of 48",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_fit_are_refused(name: str) -> None:
    config, given, words = REFUSED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(StudyError, match=words):
        check_cache(model, SamplerSettings.model_validate(given))
        check_sizes(model, SamplerSettings.model_validate(given))
    check_sizes(model, SamplerSettings())


def test_the_packed_attention_without_a_format_is_untouched(model: PreTrainedModel) -> None:
    assert model.config._attn_implementation == PACKED_ATTENTION
    batch = pack_batch([(5, 6)], [[7, 8]])
    before = hidden_states(model, batch.tokens_P, batch.packing)
    round_activations(model, SamplerSettings())
    assert torch.equal(hidden_states(model, batch.tokens_P, batch.packing), before)
