"""The ranks of a job: processes that exchange values and share tensors, started by `launch` or, on machines, torchrun.

Any other process is the only rank. It needs no process group, and every function here works for it, so that callers
need no case of their own. Ranks exchange pickled values. On one machine each is signed with a key that this run alone
can read: gloo's ports on loopback ask nobody who they are.
"""

import hmac
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tailrl.runtime.errors import ConfigurationError, NumericalError
from tailrl.runtime.launch import FOLDER_VARIABLE, KEY, STORE

Value = TypeVar("Value")

PATIENCE = timedelta(days=1)
"""How long a rank waits for another. Longer than any step: a rank that ends takes the others with it (`launch`), a
hung engine ends its rank, and the first rank may wait for a process that still trains the same run."""

NCCL_PATIENCE = timedelta(minutes=30)
"""How long a collective of GPUs may take. Ranks meet over gloo after each rollout, so that there they wait for one
micro-batch alone: a longer wait is a hang, which NCCL's watchdog then ends with SIGABRT."""


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def number() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the rank that writes files and speaks for all."""
    return number() == 0


def device() -> torch.device:
    """The device of this rank: a GPU of its own, or the CPU on a machine without GPUs."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join() -> None:
    """Make a process group of the ranks that were started together; any other process stays alone.

    The group lasts until the processes end: a rollout engine may have groups of its own on top of it.

    Raises:
        StudyError: torchrun started ranks of one machine, or did not say at which address those of several meet.
    """
    if not _has_others() or dist.is_initialized():
        return
    stay_on_loopback()
    if device().type == "cuda":
        torch.cuda.set_device(device())
    ranks = int(os.environ["WORLD_SIZE"])
    store = None
    if folder := os.environ.get(FOLDER_VARIABLE):
        sign_values((Path(folder) / KEY).read_bytes())
        store = FileStore(str(Path(folder) / STORE), ranks)
    else:
        _check_addresses()
    # Without a store: at MASTER_ADDR and MASTER_PORT.
    dist.init_process_group(_backend(), store=store, rank=int(os.environ["RANK"]), world_size=ranks, timeout=PATIENCE)
    if device().type == "cuda":
        limit_waiting(device())


def stay_on_loopback() -> None:
    """Let gloo and NCCL listen on loopback alone, unless ranks of several machines must reach one another."""
    if FOLDER_VARIABLE in os.environ or not _has_others():
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def _has_others() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _check_addresses() -> None:
    """Raises StudyError unless these are ranks of several machines, which listen where the user says."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        raise ConfigurationError(
            "torchrun opens ports of this machine to everyone who reaches it: start ranks of one machine by "
            f"`tailrl job train ... --ranks {os.environ['WORLD_SIZE']}`, without torchrun"
        )
    interfaces = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if device().type == "cuda" else [])]
    missing = [name for name in ("MASTER_ADDR", *interfaces) if not os.environ.get(name)]
    if missing or _is_loopback(os.environ["MASTER_ADDR"]):
        raise ConfigurationError(
            f"ranks of several machines need {missing[0] if missing else 'a MASTER_ADDR that is not loopback'}: name "
            "the first machine's address in a network that you trust (torchrun's --master-addr) and its interface on "
            f"each machine ({' and '.join(interfaces)})"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return address.partition(".")[0] == "localhost"


def sign_values(key: bytes) -> None:
    """From now on unpickle only what a process with the same key has pickled, in torch's collectives of objects.

    Another value raises ValueError. vLLM's and torch's own exchanges of objects are signed too.
    """
    collectives: Any = dist.distributed_c10d
    pickler, unpickler, size = collectives._pickler, collectives._unpickler, len(hmac.digest(key, b"", "sha256"))

    def signing(file: IO[bytes]) -> SimpleNamespace:
        def dump(value: Any) -> None:
            pickled = io.BytesIO()
            pickler(pickled).dump(value)
            file.write(hmac.digest(key, pickled.getbuffer(), "sha256"))
            file.write(pickled.getbuffer())

        return SimpleNamespace(dump=dump)

    def checking(file: IO[bytes]) -> Any:
        signature, pickled = file.read(size), file.read()
        if not hmac.compare_digest(signature, hmac.digest(key, pickled, "sha256")):
            raise ValueError("a value that no rank of this run has sent")
        return unpickler(io.BytesIO(pickled))

    collectives._pickler, collectives._unpickler = signing, checking


def limit_waiting(on: torch.device) -> None:
    """Let collectives of tensors on such a device fail after NCCL_PATIENCE; the process group has one limit for all."""
    dist.distributed_c10d._get_default_group()._get_backend(on)._set_default_timeout(NCCL_PATIENCE)


def mesh() -> DeviceMesh:
    """All ranks in a row, over which tensors are sharded."""
    if not dist.is_initialized():
        stay_on_loopback()
        dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device().type, (count(),))


def _backend() -> str:
    # Exchanged values lie on the CPU, on a machine with GPUs too.
    return "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor on its way between ranks: numpy pickles small arrays ten times as fast."""

    values: NDArray[np.generic]


def gathered(value: Value) -> list[Value]:
    """All-gather: all ranks' values, in rank order, detached; on the CPU if there are several ranks.

    The value can be pickled; its tensors lie in lists, dicts or dataclasses.
    """
    if count() == 1:
        return [_mapped(value, Tensor, Tensor.detach)]
    every: list[Any] = [None] * count()
    dist.all_gather_object(every, _mapped(value, Tensor, lambda tensor: _Array(tensor.detach().cpu().numpy())))
    return [_mapped(given, _Array, lambda array: torch.from_numpy(array.values)) for given in every]


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value, with every part of this kind changed."""
    if isinstance(value, kind):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), kind, change) for f in fields(value)})
    if isinstance(value, dict):
        return {key: _mapped(inner, kind, change) for key, inner in value.items()}
    return [_mapped(inner, kind, change) for inner in value] if isinstance(value, list) else value


def in_step(action: Callable[[], Value]) -> Value:
    """What the action returns on this rank; where it raises on any rank, all raise what the first of these raised."""
    if count() == 1:
        return action()
    done: list[Value] = []
    own: Exception | None = None
    try:
        done.append(action())
    except Exception as error:
        own = error
    for raised in gathered(own):
        if raised is not None:
            raise raised
    return done[0]


@contextmanager
def raised_together() -> Iterator[None]:
    """Within the block a NumericalError of any rank is raised on all ranks, so that none waits for another."""
    fault: NumericalError | None = None
    try:
        yield
    except NumericalError as error:
        fault = error
    if any_rank(fault is not None):
        sentences = gathered(None if fault is None else str(fault))
        raise NumericalError(next(sentence for sentence in sentences if sentence is not None)) from fault


def any_rank(flag: bool) -> bool:
    """Whether any rank's flag is true."""
    if count() == 1:
        return flag
    raised = torch.tensor([int(flag)])
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return bool(raised)


def share(items: Sequence[Value], together: int = 1) -> Sequence[Value]:
    """This rank's contiguous share of all items, in rank order; `together` neighbouring ranks have the same share."""
    shares, own = count() // together, number() // together
    start, stop = (len(items) * part // shares for part in (own, own + 1))
    return items[start:stop]


def dealt(items: int) -> list[tuple[int, bool]]:
    """The indices of this rank's items, dealt round robin, and whether each counts.

    A sharded model computes on all ranks at once, so that every rank gets equally many: a rank that lacks an item gets
    the last one again, which does not count.
    """
    dealt_out = range(number(), -(-items // count()) * count(), count())
    return [(min(index, items - 1), index < items) for index in dealt_out]


def in_turns(dealt_out: Sequence[Sequence[Value]]) -> list[Value]:
    """The inverse of `dealt`: the ranks' items that count, in their original order."""
    longest = max(map(len, dealt_out))
    return [items[turn] for turn in range(longest) for items in dealt_out if turn < len(items)]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, for which every rank must call this; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_first(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Named full tensors on the first rank's CPU, gathered one at a time; an empty dict elsewhere.

    Every rank must call this. A full tensor on the CPU is returned itself, not copied.
    """
    found = {}
    for name, tensor in tensors:
        together = whole(tensor)
        if is_first():
            found[name] = together.cpu()
    return found


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A full tensor, which every rank has, sharded like the other one: this rank's share, or all of it."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
