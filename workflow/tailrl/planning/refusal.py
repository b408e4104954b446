"""The sentence where a policy does not fit its devices, with what would."""

from collections.abc import Callable

from tailrl.planning.machine import Machine
from tailrl.planning.shapes import Shape

DEVICES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (24e9, 48e9, 80e9, 96e9, 141e9, 192e9, 288e9)
"""Devices and bytes of a device among which one looks for what would fit."""


def refusal(
    shape: Shape, machine: Machine, devices: int, fits: Callable[[Machine, int], bool], why: str, sharing: int = 1
) -> str:
    """The sentence; empty where the policy fits.

    Args:
        shape: the policy's sizes.
        machine: one of the devices.
        devices: devices that share the job.
        fits: whether the policy fits so many devices of a kind.
        why: what takes the memory, in a few words.
        sharing: devices that share an engine, which must divide theirs.
    """
    if fits(machine, devices):
        return ""
    more = next((n for n in DEVICES if n > devices and n % sharing == 0 and fits(machine, n)), None)
    sized = (machine.model_copy(update={"memory": size}) for size in SIZES if size > machine.memory)
    larger = next((one.memory for one in sized if fits(one, devices)), None)
    would = [f"{more} such devices would (--set-resources train:ranks={more})"] if more else []
    would += [f"{devices} of {larger / 1e9:g} GB would"] if larger else []
    nothing = "no more and no larger devices would, but a smaller training.token_budget might"
    return (
        f"a policy of {shape.parameters / 1e9:.1f} billion parameters does not fit {devices} x "
        f"{machine.memory / 1e9:.3g} GB: {why}; {' or '.join(would) or nothing}"
    )
