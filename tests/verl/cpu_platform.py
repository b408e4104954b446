"""A CPU as one of verl's platforms: what verl asks of an accelerator, answered for tests. Needs VERL_PLATFORM=cpu."""

import json
import os
import sys
from contextlib import nullcontext, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase


class Device(str):
    """A device for `Tensor.to`, a number in a text such as f"cuda:{device}"."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return "0"


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """One CPU that pretends to be one accelerator."""

    device_name = "cpu"
    vendor_name = "tests"

    @property
    def device_module(self) -> ModuleType | SimpleNamespace:
        return Memory

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return Device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:  # noqa: ARG002
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


Memory = SimpleNamespace(
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (2**34, 2**34),
    empty_cache=lambda: None,
    synchronize=lambda *_: None,
    is_available=lambda: True,
    current_device=lambda: Device("cpu"),
    device_count=lambda: 1,
    get_device_name=lambda *_: "a CPU",
    set_device=lambda *_: None,
    reset_peak_memory_stats=lambda *_: None,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    __name__="torch.cpu",
)


def add_engine() -> None:
    """Let verl's FSDP engine of language models serve the CPU."""
    from torch.distributed.fsdp import _init_utils
    from verl.models.transformers import monkey_patch
    from verl.utils import fsdp_utils
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    monkey_patch.is_trl_available = lambda: False  # verl looks for value heads that TRL 1 no longer has
    if "cpu" in EngineRegistry._engines["language_model"]["fsdp2"]:
        return
    engine = transformer_impl.FSDPEngineWithLMHead
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(engine)

    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def save_copies(module: torch.nn.Module) -> Any:
        """verl's asynchronous trainer keeps weights by `.cpu()`, which on a CPU keeps the very ones that change."""
        state, spec = save(module)
        return {name: (weight.clone(), of) for name, (weight, of) in state.items()}, spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = save_copies
    # FSDP 1 sends its weights to the other ranks from accelerators alone, and calls a CPU by its name, not by a number.
    _init_utils._check_module_states_for_sync_module_states = lambda _: None
    transformer_impl.get_device_id = lambda: torch.device("cpu")


def let_verl_start_groups() -> None:
    """verl names the backend of the CPU and of the device, here the same: `cpu:gloo,cpu:gloo` is refused."""
    plain = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *rest: Any, **named: Any) -> Any:
        return plain("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *rest, **named)

    torch.distributed.init_process_group = init_process_group


def let_vllm_get_weights() -> None:
    """vLLM packs a CPU layer's weights once, and would lose those that verl sends later."""
    from vllm.model_executor.layers import utils

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool = False) -> None:  # noqa: ARG001
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def close_viewed_memory() -> None:
    """verl closes memory that it still views: its tensors are copies on an accelerator, on a CPU the memory itself."""
    plain = SharedMemory.close

    def close(self: SharedMemory) -> None:
        with suppress(BufferError):
            plain(self)

    SharedMemory.close = close


def note_requests() -> None:
    """Writes the parameters of each request that reaches vLLM as a line of $REQUESTS, and adds $PLANTED to them."""
    from vllm.v1.engine.async_llm import AsyncLLM

    plain = AsyncLLM.generate

    def generate(self: Any, prompt: Any, sampling_params: Any, *rest: Any, **named: Any) -> Any:
        for name, value in json.loads(os.environ.get("PLANTED", "{}")).items():
            setattr(sampling_params, name, value)
        if file := os.environ.get("REQUESTS"):
            noted = {name: getattr(sampling_params, name) for name in ("min_p", "temperature", "top_p", "top_k")}
            with Path(file).open("a") as lines:
                lines.write(json.dumps(noted) + "\n")
        return plain(self, prompt, sampling_params, *rest, **named)

    AsyncLLM.generate = generate


def change_vllms_client() -> None:
    """Notes requests, and lets verl pause vLLM 0.32, where the keyword that its asynchronous trainers use is gone."""
    from vllm.v1.engine.async_llm import AsyncLLM

    note_requests()
    plain = AsyncLLM.pause_generation

    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool = False, **named: Any) -> None:
        await plain(self, mode="wait" if wait_for_inflight_requests else "abort", **named)

    AsyncLLM.pause_generation = pause_generation


def prepare_engines() -> None:
    """Changes engines once they are imported; verl imports this module before its own, vLLM's workers after theirs."""
    from tailrl.integrations.verl import plugin

    changes = {
        "verl.workers.engine.fsdp": add_engine,
        "vllm.model_executor.layers.utils": let_vllm_get_weights,
        "vllm.v1.engine.async_llm": change_vllms_client,
    }
    for name, change in changes.items():
        if name in sys.modules:
            change()
        else:
            plugin.WAITED_FOR[name] = change


let_verl_start_groups()
close_viewed_memory()
prepare_engines()
