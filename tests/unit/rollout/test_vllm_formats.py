"""Which formats vLLM is refused on which machine, before it starts; `test_vllm_quantized.py` has its engines."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailrl.config.cpu_formats import AVX512
from tailrl.config.sampler import SamplerSettings
from tailrl.rollout import make_sampler
from tailrl.rollout.vllm import quantization
from tailrl.rollout.vllm.experts import check_shared
from tailrl.runtime.errors import StudyError

pytestmark = pytest.mark.vllm

FP8, INT4, CACHE = {"quantization": "fp8"}, {"quantization": "int4"}, {"kv_cache_dtype": "fp8_e4m3"}
INT8: dict[str, Any] = {"quantization": "int8", "dtype": "float32"}
REFUSED: tuple[tuple[dict[str, Any], Any, str], ...] = (
    (FP8, set(), "quantization: fp8 needs a GPU: vLLM emulates it on a CPU, where int8 and int4 run"),
    (FP8, (8, 6), "quantization: this GPU does not multiply float8, so that vLLM would compute with 16-bit"),
    ({**FP8, "dtype": "float32"}, (9, 0), "quantization: fp8 computes in half precision on a GPU: say dtype: bfloat16"),
    (INT8, (9, 0), "quantization: int8 computes in half precision on a GPU: say dtype: bfloat16 or float16"),
    (CACHE, {"avx2", "avx_vnni"}, "kv_cache_dtype: on a CPU an fp8 cache needs AVX-512 or AMX, which this one has not"),
    (INT4, {"avx2", "avx_vnni"}, "quantization: on a CPU int4 weights need AVX-512, which this one has not"),
    (INT8, {"avx2", *AVX512}, "quantization: on a CPU int8 weights need VNNI, which this one has not"),
)


def pretend(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of a compute capability, or a CPU with these instruction sets alone."""
    gpu = isinstance(machine, tuple)
    cuda = SimpleNamespace(is_available=lambda: gpu, get_device_capability=lambda: machine)
    monkeypatch.setattr(quantization, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(quantization, "cpu_flags", lambda: machine)


@pytest.mark.parametrize(("given", "machine", "words"), REFUSED)
def test_a_machine_says_which_format_it_lacks(
    given: dict[str, Any], machine: Any, words: str, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before vLLM starts."""
    pretend(machine, monkeypatch)
    with pytest.raises(StudyError, match=rf"^sampler\.{words}"):
        make_sampler(SamplerSettings.model_validate(given), policy_folder, 128, seed=0)


ACCEPTED: tuple[tuple[dict[str, Any], Any], ...] = (
    (FP8, (8, 9)),
    (CACHE | INT4, (8, 0)),
    (CACHE | INT4, AVX512),
    (CACHE, {"amx_tile"}),
    (INT8, {"avx_vnni"}),
    (INT8, {"avx512_vnni"}),
    ({}, set()),
)


@pytest.mark.parametrize(("given", "machine"), ACCEPTED)
def test_a_machine_with_the_instructions_refuses_nothing(
    given: dict[str, Any], machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(machine, monkeypatch)
    quantization.prepare(SamplerSettings.model_validate(given))


def test_int4_with_activations_of_8_bits_is_refused() -> None:
    assert os.environ["VLLM_CPU_INT4_W4A8"] == "0"
    layer = torch.nn.Module()
    layer.use_w4a8 = True
    with pytest.raises(StudyError, match="computes int4 weights with activations of 8 bits here"):
        quantization.finish_reload(torch.nn.Sequential(layer))


def test_a_mixture_is_not_shared_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are tried whole after each hand-over. On a GPU nothing is packed, and a dense model has none."""
    experts = torch.nn.Module()
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 2, 2))
    mixture = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    mixture = torch.nn.ModuleDict({"0": mixture})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StudyError, match="ranks on CPUs do not share a mixture of experts"):
        check_shared(mixture, 2)
    check_shared(mixture, 1)
    check_shared(torch.nn.Linear(2, 2), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_shared(mixture, 2)
