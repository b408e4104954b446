"""Attention as a GPU computes it, without padding: the kernel is replaced by a reference with its limits."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from varlen_fixture import ReferenceVarlen

from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.kernels.packing import Batch, pack, pack_batch
from tailrl.kernels.varlen import serves, varlen_attention
from tailrl.model import forward
from tailrl.model.forward import PACKED_ATTENTION, head_weight, hidden_states
from tailrl.runtime.errors import StudyError

SIZES = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
# Heads of 12, 8 and 16 numbers: the kernel takes multiples of 8.
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "grouped": LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "one key head": Qwen2Config(**SIZES, num_attention_heads=3, num_key_value_heads=1),
}
# The tokens of each prompt, and of the responses to it: ragged, one response alone, some of one token, one of none.
RAGGED = {
    "ragged": [(7, [40, 3, 1, 17]), (2, [9]), (1, [5, 28]), (4, [1]), (6, [0, 12])],
    "no two alike": [(3, [50]), (9, [2]), (1, [1]), (5, [21])],
    "one": [(4, [6])],
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=PACKED_ATTENTION)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 1.0)
    return model.to(dtype)


def make_batch(lengths: str) -> Batch:
    torch.manual_seed(1)
    groups = [(torch.randint(90, (p,)).tolist(), responses) for p, responses in RAGGED[lengths]]
    prompts = [prompt for prompt, responses in groups for _ in responses]
    return pack_batch(prompts, [torch.randint(90, (n,)).tolist() for _, responses in groups for n in responses])


def scored(model: PreTrainedModel, batch: Batch, rule: str = "min_p") -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of a function of them."""
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    logp_T = constrained_logprobs(hidden_TH, head_weight(model), batch.targets_T, rule, -6.0).logp_T
    model.zero_grad()
    (logp_T * torch.linspace(-1, 1, len(logp_T))).sum().backward()  # type: ignore[no-untyped-call]
    return logp_T.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReferenceVarlen]:
    """Has the forward take what a GPU takes, with the reference in place of the kernel."""

    def take(*dtypes: torch.dtype) -> ReferenceVarlen:
        reference = ReferenceVarlen(*([dtypes] if dtypes else []))
        monkeypatch.setattr(varlen, "varlen_attn", reference)
        monkeypatch.setattr(forward, "serves", lambda query: query.dtype in reference.dtypes)
        return reference

    return take


def test_the_reference_has_the_kernels_signature() -> None:
    own, theirs = (inspect.signature(function).parameters for function in (ReferenceVarlen(), varlen.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in own.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_gives_the_padded_paths_log_probs_and_gradients(
    name: str, lengths: str, as_a_gpu: Callable[..., ReferenceVarlen]
) -> None:
    model, batch = make_model(name), make_batch(lengths)
    padded_T, expected = scored(model, batch)
    reference = as_a_gpu(torch.float32)
    logp_T, gradients = scored(model, batch)
    assert reference.calls == model.config.num_hidden_layers
    torch.testing.assert_close(logp_T, padded_T, rtol=0, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        largest = max(1.0, expected[parameter].abs().max().item())
        torch.testing.assert_close(gradient, expected[parameter], rtol=0, atol=1e-4 * largest, msg=parameter)


def test_an_older_pytorch_gets_repeated_keys(
    as_a_gpu: Callable[..., ReferenceVarlen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.11 knows no `enable_gqa`; the H200 whose results are published had it."""
    shapes, offsets = [(7, heads, 8) for heads in (6, 2, 2)], torch.tensor([3, 4])
    torch.manual_seed(0)
    rows = [torch.randn(shape) for shape in shapes]
    segments = pack(offsets.tolist()).segments
    reference = as_a_gpu(torch.float32)
    expected = varlen_attention(*rows, segments, 0.3)

    def older(query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float, window_size: Any) -> Tensor:
        assert key.shape == value.shape == query.shape
        return reference(query, key, value, *rest, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", older)
    torch.testing.assert_close(varlen_attention(*rows, segments, 0.3), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bfloat16_it_is_as_near_to_float32_as_the_padded_path(
    name: str, as_a_gpu: Callable[..., ReferenceVarlen]
) -> None:
    """With the kernel's own dtypes, on the full vocabulary: rounding moves tokens across the cut of a safe set."""
    batch = make_batch("ragged")
    rounded = make_model(name, torch.bfloat16)
    exact_T, exact = scored(make_model(name, torch.bfloat16).float(), batch, "full")
    padded_T, padded = scored(rounded, batch, "full")
    reference = as_a_gpu()
    logp_T, gradients = scored(rounded, batch, "full")
    assert reference.calls
    assert (logp_T - exact_T).abs().mean() <= 1.3 * (padded_T - exact_T).abs().mean()
    for parameter, wanted in exact.items():
        error, other = ((found[parameter] - wanted).abs().mean() for found in (gradients, padded))
        assert error <= 1.3 * other + 1e-3, parameter


def flops(model: PreTrainedModel, batch: Batch) -> int:
    with FlopCounterMode(display=False) as counter:
        hidden_states(model, batch.tokens_P, batch.packing)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("lengths", ["ragged", "no two alike"])
def test_its_products_are_the_tokens_own(lengths: str, as_a_gpu: Callable[..., ReferenceVarlen]) -> None:
    """At most 1.1 times those of each prompt once, and of each response's tokens over its keys."""
    model, batch = make_model("grouped"), make_batch(lengths)
    weights = sum(p.numel() for n, p in model.base_model.named_parameters() if p.ndim == 2 and "embed" not in n)
    over_keys = 4 * model.config.num_hidden_layers * model.config.hidden_size
    # The last token of a response is not in the row.
    pairs = [(p, p) for p, _ in RAGGED[lengths]] + [
        (max(n - 1, 0), p + max(n - 1, 0)) for p, responses in RAGGED[lengths] for n in responses
    ]
    own = 2 * weights * len(batch.tokens_P) + over_keys * sum(queries * keys for queries, keys in pairs)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's own kernel is not counted
        padded = flops(model, batch)
    as_a_gpu(torch.float32)
    assert own <= flops(model, batch) <= 1.1 * own
    assert padded > 1.3 * own, "the lengths are not ragged enough to see a difference"


def test_a_row_without_prefixes_is_its_own_keys() -> None:
    packing = pack([3, 1, 4])
    segments = packing.segments
    copied = _apply_to_tensors(lambda tensor: tensor, packing)  # as FSDP2 does with each layer's arguments
    assert copied is not packing and copied.segments is segments
    assert segments.token_J is None and segments.repeated == ()
    assert segments.query_ends.tolist() == segments.key_ends.tolist() == [0, 3, 4, 8]


def test_the_kernel_itself_takes_the_arguments() -> None:
    """Its own checks, its shapes and its registered backward, on tensors without numbers."""
    packing = make_batch("ragged").packing
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (
            torch.empty(len(packing.token_P), heads, 12, dtype=torch.bfloat16, requires_grad=True)
            for heads in (6, 2, 2)
        )
        out = varlen_attention(query, key, value, packing.segments, 0.3)
        assert out.shape == query.shape and out.dtype == torch.bfloat16
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
        assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


# --- where it does not serve -----------------------------------------------------------------------------


class OnCuda(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "expected"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 256, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.float16, 64, (7, 5), False),
    ],
)
def test_which_queries_the_kernel_serves(
    dtype: torch.dtype, size: int, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    query = torch.zeros(1, 2, 3, size, dtype=dtype)
    assert serves(query.as_subclass(OnCuda)) is expected
    assert not serves(query), "a CPU takes the padded view"


@pytest.mark.parametrize("size", [8, 12])
def test_float32_on_a_gpu_never_takes_the_definition(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition's memory grows with the square of the length, and is what PyTorch takes for grouped heads."""
    seen = []

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        backends: Any = torch.backends.cuda
        seen.append((query.shape, key.shape, value.shape, options.get("enable_gqa", False)))
        assert backends.mem_efficient_sdp_enabled()
        assert not (backends.math_sdp_enabled() or backends.flash_sdp_enabled() or backends.cudnn_sdp_enabled())
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(query, key, value, **options)

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 5, size), torch.randn(3, 2, 5, size), torch.randn(3, 2, 5, size)
    expected = forward.padded_attention(query, key, value, 0.3)
    monkeypatch.setattr(forward, "scaled_dot_product_attention", attention)
    found = forward.padded_attention(query.as_subclass(OnCuda), key, value, 0.3)
    assert seen == [((3, 6, 5, -(-size // 8) * 8),) * 3 + (False,)]
    torch.testing.assert_close(found.as_subclass(Tensor), expected)


def test_a_gpu_without_such_a_kernel_is_said() -> None:
    """Here PyTorch finds none, since this machine has no GPU."""
    query = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16).as_subclass(OnCuda)
    with pytest.raises(StudyError, match=r"no attention in bfloat16 .* set training\.dtype: float32"):
        forward.padded_attention(query, query, query, 0.3)
