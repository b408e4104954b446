"""Refuses a job that cannot fit, before it computes: one sentence with what would.

Only what lies on a device all the time is counted, so that no job is refused that could run. `tailrl plan` counts the
rest.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from tailrl.config.jobs import Run
from tailrl.config.policy import PretrainedPolicy
from tailrl.config.sampler import SamplerSettings
from tailrl.planning.machine import Machine
from tailrl.planning.memory import engine_weights, peak
from tailrl.planning.plan import plan_job, refusal
from tailrl.planning.shapes import Shape, known_shape
from tailrl.planning.work import work_of
from tailrl.runtime.devices import attached
from tailrl.runtime.distributed import device
from tailrl.runtime.errors import ConfigurationError

TOO_LARGE_FOR_A_CPU = 1e9  # parameters of a policy that a CPU would train or sample for weeks
ALWAYS_THERE = ("libraries", "weights", "gradients", "optimizer state", "engine's weights")


def check_training(run: Run, folder: Path, ranks: int) -> None:
    """Raises StudyError where the policy in `folder` cannot be trained by so many ranks, a device each."""

    def held(shape: Shape, machine: Machine, devices: int) -> float:
        parts = plan_job(shape, run, work_of(run.training, 1, 1, devices), machine, devices).parts
        return peak({part: parts[part] for part in ALWAYS_THERE})

    _check(folder, ranks, held, "weights, gradients, optimizer state and the engine", run.sampler.sharing)


def check_sampling(sampler: SamplerSettings, folder: Path) -> None:
    """Raises StudyError where an engine for the policy in `folder` does not fit this process's device."""
    what = f"the engine's weights in {(sampler.formats and sampler.formats.quantization) or sampler.dtype}"
    _check(folder, 1, lambda shape, machine, _: engine_weights(shape, sampler) + machine.reserve, what)


def _check(folder: Path, ranks: int, held: Callable[[Shape, Machine, int], float], what: str, sharing: int = 1) -> None:
    """Raises StudyError where the policy does not fit so many of this process's devices.

    Nothing is said of a policy whose sizes the plan does not know, nor of the memory of a CPU, which jobs share.

    Args:
        folder: the policy's.
        ranks: devices that share the job.
        held: the bytes that each device has in use during the whole job, from shape, machine and number of devices.
        what: these bytes in words, as "weights and gradients".
        sharing: devices that share an engine.
    """
    shape = known_shape(PretrainedPolicy(source="pretrained", path=str(folder)))
    if shape is None:
        return
    if device().type == "cuda":
        machine = Machine(memory=_memory())
        why = f"{what} take {held(shape, machine, ranks) / 1e9:.0f} GB of each"
        said = refusal(shape, machine, ranks, lambda one, n: held(shape, one, n) <= one.memory, why, sharing)
        if said:
            raise ConfigurationError(f"{folder}: {said}")
    elif shape.parameters > TOO_LARGE_FOR_A_CPU or (ranks > 1 and attached()):
        whose = f"{ranks} ranks" if ranks > 1 else f"a policy of {shape.parameters / 1e9:.1f} billion parameters"
        raise ConfigurationError(
            f"{folder}: {whose} would run on the CPU, since torch {torch.__version__} finds no GPU: make ... "
            "PINS=envs/gpu.txt installs the environment for GPUs, and PINS=envs/gpu.txt snakemake --sdm conda likewise"
        )


def _memory() -> float:
    """Bytes of this process's GPU."""
    return float(torch.cuda.get_device_properties(device()).total_memory)
