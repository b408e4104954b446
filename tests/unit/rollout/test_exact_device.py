"""The exact engine beside a GPU, on a machine without one: where its tensors are made, and what it says."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exact_fixture import ROW_MULTIPLES, random_policy, random_requests, sampler_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tailrl.config.sampler import SamplerSettings
from tailrl.config.training import Training
from tailrl.kernels import batch_invariant, exact_logprobs
from tailrl.kernels.batch_invariant import GPU_ROWS, ROWS, causal_attention, future_bias, logit_chunks, pad_rows
from tailrl.model.forward import head_weight
from tailrl.rollout import Decoding, kv_cache, self_test
from tailrl.rollout.exact import ExactSampler
from tailrl.rollout.kv_cache import Flight
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.training.placement import place

MADE = (torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange)
ON_THE_CPU = ("packing.py", "noise.py")  # which make theirs there, and then move them


class OnCuda(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True


class MadeWhere(TorchFunctionMode):
    """Notes the places of the package where a tensor is made without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.nowhere: set[str] = set()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename)
        ours = "tailrl" in file.parts and file.name not in ON_THE_CPU
        if ours and function in MADE and "device" not in (kwargs or {}):
            self.nowhere.add(f"{file.name}:{caller.f_lineno}")
        return function(*args, **(kwargs or {}))


def test_every_tensor_of_the_engine_is_made_on_its_device(tmp_path: Path) -> None:
    sampler = sampler_of(random_policy("llama", "float32"), tmp_path)
    with MadeWhere() as made:
        assert sampler.self_test(random_requests(4, threshold=-3.0), Decoding(0.7, 6, "min_p")) == 0
    assert made.nowhere == set()


def test_engine_and_trainer_are_on_the_ranks_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_policy("llama", "float32")
    sampler_of(model, tmp_path)
    monkeypatch.setattr(distributed, "device", lambda: torch.device("meta"))
    sampler = ExactSampler(tmp_path, SamplerSettings(engine="exact", dtype="float32"), 50)
    assert {tensor.device.type for tensor in (*sampler.model.parameters(), sampler.stop)} == {"meta"}
    place(model, Training(dtype="float32"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("rows", [16, 128, 144, 400])
def test_every_product_on_a_gpu_has_one_shape(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the number of other rows chooses no other kernel."""
    seen, linear = set(), torch.nn.functional.linear

    def noted(rows_RI: Tensor, *rest: Tensor) -> Tensor:
        seen.add(tuple(rows_RI.shape))
        return linear(rows_RI, *rest)

    monkeypatch.setattr(batch_invariant, "linear", noted)
    rows_RI, weight_OI, bias_O = torch.randn(rows, 24), torch.randn(7, 24), torch.randn(7)
    found = batch_invariant.product(rows_RI.as_subclass(OnCuda), weight_OI, bias_O)
    assert seen == {(batch_invariant.GPU_ROWS, 24)}
    torch.testing.assert_close(found.as_subclass(Tensor), linear(rows_RI, weight_OI, bias_O))


def test_rows_of_logits_on_a_gpu_have_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the trainer and of the engine: it chooses how a GPU sums a row of a large vocabulary."""
    for rows in (1, 128, 129, 300):
        parts = [torch.zeros(rows, 2).as_subclass(OnCuda)[part] for part in logit_chunks(rows, 50, on_gpu=True)]
        assert {len(pad_rows(part)) for part in parts} == {GPU_ROWS} and sum(map(len, parts)) == rows
    assert len(pad_rows(torch.zeros(1))) == ROWS, "a CPU needs fewer"
    model, requests = random_policy("llama", "float32"), random_requests(3)
    assert Flight(model, requests, [4, 4, 4]).drawn_multiple == ROW_MULTIPLES["llama"]
    monkeypatch.setattr(kv_cache, "head_weight", lambda _: head_weight(model).as_subclass(OnCuda))
    flight = Flight(model, requests, [4, 4, 4])
    assert flight.admit() and len(flight.step().hidden_SH) == GPU_ROWS
    assert kv_cache.SEQUENCES_IN_FLIGHT <= GPU_ROWS, "else a step has another number of rows than the trainer"


def test_the_trainer_scores_such_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def head_logits(hidden_RH: Tensor, weight_VH: Tensor, *_: object) -> Tensor:
        seen.append(len(hidden_RH))
        return (hidden_RH @ weight_VH.T).as_subclass(Tensor)

    monkeypatch.setattr(exact_logprobs, "head_logits", head_logits)
    hidden_TH, weight_VH = torch.randn(300, 4).as_subclass(OnCuda), torch.randn(50, 4).as_subclass(OnCuda)
    tokens_T, threshold_T1 = torch.arange(300) % 50, torch.full((300, 1), -3.0)
    rows = (hidden_TH, weight_VH, tokens_T.as_subclass(OnCuda), threshold_T1.as_subclass(OnCuda))
    exact_logprobs.exact_logprobs(*rows, exact_logprobs.Scoring("min_p"), [0] * 300, list(range(300)))
    assert seen == [GPU_ROWS] * 3


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 3)])
def test_attention_on_a_gpu_is_the_kernels(heads: int, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its arguments in order; the kernel's place is taken by the definition."""
    seen = []

    def attention_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
        seen.append(query.shape)
        return (scaling * query @ key + bias).softmax(-1) @ value

    kernel = ModuleType("tailrl.kernels.attention_rows")
    kernel.attention_rows = attention_rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tailrl.kernels.attention_rows", kernel)
    query, key, value = (
        torch.randn(2, 5, heads, 8),
        torch.randn(2, key_heads, 8, 32),
        torch.randn(2, key_heads, 32, 8),
    )
    bias = future_bias(torch.arange(5)[None], heads // key_heads, 32)
    expected = causal_attention(query, key, value, bias, 0.3)
    found = causal_attention(query.as_subclass(OnCuda), key, value, bias, 0.3).as_subclass(Tensor)
    assert seen == [(2, key_heads, 5 * heads // key_heads, 8)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_gpu_where_it_is_not_exact_is_said(on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(random_policy("llama", "float32"), tmp_path)
    monkeypatch.setattr(self_test, "differing_tokens", lambda *_: 3)
    monkeypatch.setattr(self_test, "uneven_lengths", lambda *_: [])
    weight = torch.zeros(1)
    monkeypatch.setattr(self_test, "head_weight", lambda _: weight.as_subclass(OnCuda) if on_gpu else weight)
    with pytest.raises(StudyError, match="not exact on this machine: 3 of the trainer's") as raised:
        sampler.self_test(random_requests(2), Decoding(1.0, 2))
    assert ("run it without a GPU" in str(raised.value)) == on_gpu
