"""The exact engine beside a GPU, on a machine without one: where its tensors are made, and what it says."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_fixture import random_policy, random_requests, sampler_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tailrl.config.sampler import SamplerSettings
from tailrl.config.training import Training
from tailrl.kernels import batch_invariant
from tailrl.rollout import Decoding, self_test
from tailrl.rollout.exact import ExactSampler
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


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_gpu_where_it_is_not_exact_is_said(on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(random_policy("llama", "float32"), tmp_path)
    monkeypatch.setattr(self_test, "differing_tokens", lambda *_: 3)
    weight = torch.zeros(1)
    monkeypatch.setattr(self_test, "head_weight", lambda _: weight.as_subclass(OnCuda) if on_gpu else weight)
    with pytest.raises(StudyError, match="not exact on this machine: 3 of the trainer's") as raised:
        sampler.self_test(random_requests(2), Decoding(1.0, 2))
    assert ("run it without a GPU" in str(raised.value)) == on_gpu
