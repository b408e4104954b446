"""The processes that share a job: which of them this one is, what they tell one another, and shares of tensors.

torchrun starts them and calls each a rank. A process of its own is the only rank: it needs no process group, and gets
back here what it gave, so that the code that calls this is the same for any number. The ranks of a job trust one
another: what they tell one another is pickled.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

Value = TypeVar("Value")

PATIENCE = timedelta(days=1)
"""How long a rank waits for another. Longer than any step: a rank that ends takes the others with it (`launch`), an
engine that hangs ends its rank, and the first rank may be waiting for a process that still trains the same run."""


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def number() -> int:
    """Which one this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the rank that writes files and speaks for all."""
    return number() == 0


def device() -> torch.device:
    """Where this rank computes: a GPU of its own on its machine, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join() -> None:
    """From now on the processes that torchrun started know one another; one that it did not start stays alone.

    They part when they end: a rollout engine may have groups of its own on theirs until then.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if device().type == "cuda":
            torch.cuda.set_device(device())
        dist.init_process_group(_backend(), timeout=PATIENCE)


def mesh() -> DeviceMesh:
    """All ranks in a row, over which tensors are sharded."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device().type, (count(),))


def _backend() -> str:
    # What ranks tell one another lies on the CPU, on a machine with GPUs too.
    return "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"


# --- what ranks tell one another -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor on its way: numpy pickles a small one ten times as fast."""

    values: NDArray[np.generic]


def gathered(value: Value) -> list[Value]:
    """All ranks' values, in rank order, without gradients; tensors on the CPU where there are several ranks.

    Args:
        value: anything that can be pickled; tensors in it lie in lists, dicts or dataclasses.
    """
    if count() == 1:
        return [_mapped(value, Tensor, Tensor.detach)]
    every: list[Any] = [None] * count()
    dist.all_gather_object(every, _mapped(value, Tensor, lambda tensor: _Array(tensor.detach().cpu().numpy())))
    return [_mapped(given, _Array, lambda array: torch.from_numpy(array.values)) for given in every]


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value with everything of a kind changed in it."""
    if isinstance(value, kind):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), kind, change) for f in fields(value)})
    if isinstance(value, dict):
        return {key: _mapped(inner, kind, change) for key, inner in value.items()}
    return [_mapped(inner, kind, change) for inner in value] if isinstance(value, list) else value


def any_rank(flag: bool) -> bool:
    """Whether the flag is up on any rank."""
    if count() == 1:
        return flag
    raised = torch.tensor([int(flag)])
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return bool(raised)


# --- who does what -------------------------------------------------------------------------------------


def share(items: Sequence[Value], together: int = 1) -> Sequence[Value]:
    """The run of the items that is this rank's; the shares follow one another in the ranks' order.

    Args:
        items: of all ranks.
        together: so many ranks, one after another, have the same share.
    """
    shares, own = count() // together, number() // together
    start, stop = (len(items) * part // shares for part in (own, own + 1))
    return items[start:stop]


def dealt(items: int) -> list[tuple[int, bool]]:
    """The items that are this rank's, dealt in turns, and whether each counts.

    Every rank gets as many, for a sharded model computes on all ranks at once; one that lacks an item gets the last one
    again, which does not count.
    """
    turns = -(-items // count())
    places = [turn * count() + number() for turn in range(turns)]
    return [(min(place, items - 1), place < items) for place in places]


def in_turns(dealt_out: Sequence[Sequence[Value]]) -> list[Value]:
    """The items that count, as they were before they were dealt: one of each rank in turns."""
    longest = max(map(len, dealt_out))
    return [items[turn] for turn in range(longest) for items in dealt_out if turn < len(items)]


# --- shares of tensors ---------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each rank has a share, put together; every rank must ask. Any other one is whole already."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_first(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Named tensors, put together one at a time, on the first rank's CPU; no others elsewhere. Every rank must ask.

    Those that are whole and on the CPU already are the very ones that were given.
    """
    found = {}
    for name, tensor in tensors:
        together = whole(tensor)
        if is_first():
            found[name] = together.cpu()
    return found


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, which every rank has, as the other one is: this rank's share of it, or all of it."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
