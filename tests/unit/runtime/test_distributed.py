"""The ranks' process group: how long one waits for another."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks_fixture import on_ranks

from tailrl.runtime import distributed


def test_a_hang_of_the_gpus_is_seen_within_the_hour(tmp_path: Path) -> None:
    """Gloo's backend stands for NCCL's, which has the same limit."""

    def limits() -> tuple[timedelta, timedelta]:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        before = backend.options._timeout
        distributed.limit_waiting(torch.device("cpu"))
        return before, backend.options._timeout

    for before, after in on_ranks(2, tmp_path, limits):
        assert before != after == distributed.NCCL_PATIENCE <= timedelta(hours=1)
