"""The ranks' process group: how long one waits for another, what it unpickles, and where it may listen."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_fixture import on_ranks

from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError


def test_a_hang_of_the_gpus_is_seen_within_the_hour(tmp_path: Path) -> None:
    """Gloo's backend stands for NCCL's, which has the same limit."""

    def limits() -> tuple[timedelta, timedelta]:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        before = backend.options._timeout
        distributed.limit_waiting(torch.device("cpu"))
        return before, backend.options._timeout

    for before, after in on_ranks(2, tmp_path, limits):
        assert before != after == distributed.NCCL_PATIENCE <= timedelta(hours=1)


class Runs:
    """Code that runs where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("stranger", [True, False], ids=["another key", "the run's key"])
def test_what_a_stranger_sends_is_not_unpickled(tmp_path: Path, stranger: bool) -> None:
    """Gloo asks nobody who they are: the second rank is a stranger in its place, without the key."""
    trace = tmp_path / "ran"

    def exchange() -> str:
        key = b"another" if stranger and distributed.number() == 1 else b"of this run"
        distributed.sign_values(key)
        every = [None, None]
        try:
            dist.all_gather_object(every, Runs(trace) if distributed.number() == 1 else None)
        except ValueError as error:
            return str(error)
        return "unpickled"

    refused = "a value that no rank of this run has sent"
    assert on_ranks(2, tmp_path, exchange) == ([refused, refused] if stranger else ["unpickled", "unpickled"])
    assert trace.exists() != stranger


MACHINES = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "192.0.2.1",
    "GLOO_SOCKET_IFNAME": "eth1",
}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, r"^torchrun opens ports .* `tailrl job train \.\.\. --ranks 4`, without torchrun$"),
        ({"MASTER_ADDR": ""}, r"^ranks of several machines need MASTER_ADDR: name the first machine's address"),
        ({"MASTER_ADDR": "localhost"}, "need a MASTER_ADDR that is not loopback"),
        ({"MASTER_ADDR": "127.0.0.1"}, "need a MASTER_ADDR that is not loopback"),
        ({"MASTER_ADDR": "::1"}, "need a MASTER_ADDR that is not loopback"),
        ({"GLOO_SOCKET_IFNAME": ""}, r"need GLOO_SOCKET_IFNAME: .* interface on each machine \(GLOO_SOCKET_IFNAME\)$"),
    ],
)
def test_ranks_of_several_machines_listen_where_the_user_says(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAILRL_LAUNCHER", raising=False)
    for name, value in (MACHINES | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StudyError, match=words):
        distributed.join()


def test_the_address_of_several_machines_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine use loopback, whatever the environment says."""
    for name, value in MACHINES.items():
        monkeypatch.setenv(name, value)
    distributed.stay_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setenv("TAILRL_LAUNCHER", "/a/folder")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    distributed.stay_on_loopback()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
