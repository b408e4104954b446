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
from tailrl.planning.memory import engine_weights, peak, training_memory
from tailrl.planning.plan import refusal
from tailrl.planning.shapes import Shape, known_shape
from tailrl.planning.work import work_of
from tailrl.runtime.devices import attached
from tailrl.runtime.distributed import device
from tailrl.runtime.errors import ConfigurationError

TOO_LARGE_FOR_A_CPU = 1e9
"""Parameters of a policy that a CPU would train or sample for weeks."""
ALWAYS_THERE = ("weights", "gradients", "optimizer state")


def check_training(run: Run, folder: Path, ranks: int) -> None:
    """Raises StudyError where the policy in `folder` cannot be trained by so many ranks, a device each."""
    shape = _shape(folder)
    if shape is None:
        return
    _check_torch(shape, folder, ranks)

    def held(machine: Machine, devices: int) -> float:
        """Bytes of a device that trainer and engine take whatever the lengths."""
        parts = training_memory(shape, run, work_of(run.training, 1, 1, devices), machine, devices)
        engine = {"engine's weights": _engine(shape, run.sampler), "engine's cache": 0.0}
        return peak({name: parts[name] for name in ALWAYS_THERE} | engine, run.sampler, machine)

    what = "weights, gradients, optimizer state and the engine"
    _refuse(shape, folder, ranks, held, what, run.sampler.sharing)


def check_sampling(sampler: SamplerSettings, folder: Path) -> None:
    """Raises StudyError where an engine for the policy in `folder` does not fit this process's device."""
    shape = _shape(folder)
    if shape is None:
        return
    _check_torch(shape, folder, 1)
    needed = _engine(shape, sampler)
    what = f"the engine's weights in {(sampler.formats and sampler.formats.quantization) or sampler.dtype}"
    _refuse(shape, folder, 1, lambda machine, _: needed + machine.reserve, what)


def _refuse(
    shape: Shape, folder: Path, ranks: int, held: Callable[[Machine, int], float], what: str, sharing: int = 1
) -> None:
    """Raises StudyError where what is held, named by `what`, is more than this process's GPU has."""
    memory = _memory()
    if memory is None:
        return
    machine = Machine(memory=memory)
    why = f"{what} take {held(machine, ranks) / 1e9:.0f} GB of each"
    said = refusal(shape, machine, ranks, lambda one, n: held(one, n) <= one.memory, why, sharing)
    if said:
        raise ConfigurationError(f"{folder}: {said}")


def _engine(shape: Shape, sampler: SamplerSettings) -> float:
    return engine_weights(shape, sampler) / sampler.sharing


def _shape(folder: Path) -> Shape | None:
    """The policy's sizes; None for a family that the plan does not know, or a folder that the job itself refuses."""
    return known_shape(PretrainedPolicy(source="pretrained", path=str(folder)))


def _check_torch(shape: Shape, folder: Path, ranks: int) -> None:
    if device().type == "cuda" or (shape.parameters <= TOO_LARGE_FOR_A_CPU and not (ranks > 1 and attached())):
        return
    what = f"{ranks} ranks" if ranks > 1 else f"a policy of {shape.parameters / 1e9:.1f} billion parameters"
    raise ConfigurationError(
        f"{folder}: {what} would run on the CPU, since torch {torch.__version__} finds no GPU: make ... "
        "PINS=envs/gpu.txt installs the environment for GPUs, and PINS=envs/gpu.txt snakemake --sdm conda likewise"
    )


def _memory() -> float | None:
    """Bytes of this process's GPU; None on a CPU, whose memory jobs share."""
    return float(torch.cuda.get_device_properties(device()).total_memory) if device().type == "cuda" else None
