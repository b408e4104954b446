"""Several ranks in a test: forks of this process, which share what it has imported, patched and built."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS = 100.0


def on_ranks(count: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function returns on each of so many gloo ranks; fails with the traceback of those that raise.

    Args:
        count: how many.
        folder: gets a folder by which they find one another.
        function: gets the arguments; what it changes in memory is lost with its process.
        arguments: likewise.
    """
    meeting = tempfile.mkdtemp(dir=folder)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(target=_rank, args=(rank, count, meeting, writer, function, arguments))
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        results = [
            pickle.loads(reader.recv_bytes()) if reader.poll(SECONDS) else ("it hangs", None) for reader, _ in pipes
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(results) if failure]
    assert not failures, "\n".join(failures)
    return [result for _, result in results]


def _rank(
    rank: int, count: int, meeting: str, writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}/ranks",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=SECONDS),
        )
        answer: tuple[str, Any] = ("", function(*arguments))
    except BaseException:
        answer = (traceback.format_exc(), None)
    # By itself: multiprocessing would hand over tensors as files of a process that is about to end.
    writer.send_bytes(pickle.dumps(answer))
    # Not by the end of the interpreter, which would run what the test runner has left to do.
    os._exit(0)
