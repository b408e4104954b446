"""The GPUs that this process may use, and those that a job takes for itself.

Snakemake counts how many jobs run at once, but not on which GPU: by itself, each job would use the first one. So a job
locks its GPUs and names them in CUDA_VISIBLE_DEVICES before torch is imported. The system drops the locks of a process
that ends in any way.
"""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from tailrl.runtime.atomic_files import hold
from tailrl.runtime.errors import ConfigurationError, StorageError, reason, say
from tailrl.runtime.private_folder import private_folder

VISIBLE = "CUDA_VISIBLE_DEVICES"
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Variables of schedulers, which number the GPUs of each allocation from 0: equal numbers are other GPUs there."""
RANK_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""What torchrun tells a process that it starts, and what another process would read there."""
NODES, CPU = Path("/dev"), Path("/proc/cpuinfo")
BETWEEN_LOOKS = 1.0
"""Seconds between two looks for free GPUs."""

taken: list[IO[bytes]] = []
"""The locks that this process holds until it ends."""


def attached() -> int:
    """How many GPUs this machine, or this container, has."""
    return len(list(NODES.glob("nvidia[0-9]*")))


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this machine's CPU, as Linux names them; none where it does not say."""
    try:
        lines = CPU.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def has_cuda() -> bool:
    """Whether the installed torch can use a GPU; does not import it."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def visible() -> list[str]:
    """The GPUs for this process and its jobs, by number or UUID: those that CUDA_VISIBLE_DEVICES names, or all.

    Empty without a GPU, and with a torch that knows none unless the variable is set.
    """
    named = os.environ.get(VISIBLE)
    if named is None:
        return [str(number) for number in range(attached())] if has_cuda() else []
    devices: list[str] = []
    for device in map(str.strip, named.split(",")):
        # As CUDA does: what cannot be a device hides all that follow.
        if not device or device.startswith("-") or device == "NoDevFiles":
            break
        devices.append(device)
    return devices


def on_its_own() -> tuple[int, int]:
    """This rank's number and how many there are; (0, 1) for a process that is no rank.

    From here on the rank is a process of its own, with one of the GPUs: no library takes it for a part of a group.
    """
    number, count, local = (int(os.environ.pop(name, default)) for name, default in RANK_VARIABLES.items())
    if count > 1 and (devices := visible()):
        os.environ[VISIBLE] = devices[local]
    return number, count


def take(count: int) -> list[str]:
    """Take so many GPUs, which no other job of this user then takes, and make them the only visible ones.

    Waits until they are free, and says so on stderr. Without any GPU it changes nothing. Call it before CUDA is used.

    Returns:
        The GPUs taken.

    Raises:
        StudyError: there are fewer, or their locks cannot be made.
    """
    devices = visible()
    if not devices:
        return []
    if count > len(devices):
        raise ConfigurationError(
            f"{count} GPUs are needed, one a rank, and {len(devices)} are visible here ({VISIBLE}: "
            f"{os.environ.get(VISIBLE, 'not set')}): ask for as many ranks as GPUs"
        )
    allocation = next((os.environ[name] for name in ALLOCATIONS if os.environ.get(name)), "machine")
    folder = private_folder(f"tailrl-gpus-{os.getuid()}")
    said = False
    while True:
        try:
            locks = _free(folder, allocation, devices, count)
        except OSError as error:
            raise StorageError(f"{folder}: the GPUs cannot be shared out there: {reason(error)}") from None
        if len(locks) == count:
            break
        if not said:
            say(f"waiting for {count} of the GPUs {', '.join(devices)}, which other jobs use")
            said = True
        time.sleep(BETWEEN_LOOKS)
    taken.extend(locks.values())
    os.environ[VISIBLE] = ",".join(locks)
    return list(locks)


def _free(folder: Path, allocation: str, devices: list[str], count: int) -> dict[str, IO[bytes]]:
    """Locks of `count` free devices, or none: a job that held some and waited for others could wait for ever."""
    import fcntl  # Unix has it alone, and commands without GPUs run elsewhere too

    found: dict[str, IO[bytes]] = {}
    with (folder / "choosing").open("ab") as chooser:
        fcntl.flock(chooser, fcntl.LOCK_EX)
        for device in devices:
            if len(found) < count and (lock := hold(folder / f"{allocation}-{device.replace('/', '-')}")) is not None:
                found[device] = lock
        if len(found) == count:
            return found
    for lock in found.values():
        lock.close()
    return {}
