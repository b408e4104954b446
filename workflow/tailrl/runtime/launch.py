"""Starts the ranks of a job on this machine, and ends with their exit code.

It calls torchrun's agent as a library. The command torchrun always ends with 1, but the training rule must know more:
it repeats a job that was killed or hung, and not one that reported bad input. On several machines torchrun starts the
same processes: `torchrun --no-python ... tailrl job train ...`.
"""

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tailrl.runtime.errors import StudyError, say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FOLDER_VARIABLE = "TAILRL_LAUNCHER"
"""A variable of the ranks' environment: the launcher's folder, below which their error files lie."""

ENDED_BY_AGENT = -15
"""SIGTERM, which the other ranks get when one has failed."""


def launch(ranks: int, command: Sequence[str]) -> None:
    """Run a command (a program and its arguments) as so many ranks, with the environment that torchrun sets.

    If one fails, the others are ended, and this process ends with its code.

    Raises:
        StudyError: a rank reported bad input (`tell_launcher`).
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        logging.disable(logging.ERROR)  # the agent's many lines; one is printed below
        try:
            elastic_launch(config, "env")(f"{FOLDER_VARIABLE}={folder}", *command)
        except ChildFailedError as error:
            # A rank that reported bad input counts, even if it was not the first to fail.
            for file in sorted(Path(folder).rglob("error.json")):
                raise StudyError(json.loads(file.read_text(encoding="utf-8"))["message"]) from None
            rank, failure = _cause(error.failures)
        except SignalException as error:
            # By the same signal, not with a code: the shell then stops too.
            signal.signal(error.sigval, signal.SIG_DFL)
            os.kill(os.getpid(), error.sigval)
        else:
            return
        finally:
            logging.disable(logging.NOTSET)
    why = ", as NCCL ends a rank that waited too long for another" if failure.exitcode == -signal.SIGABRT else ""
    say(f"rank {rank} of {ranks} ended with {failure.exitcode}{why}")
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


def _cause(failures: Mapping[int, "ProcessFailure"]) -> tuple[int, "ProcessFailure"]:
    """The failure that explains the others: a killed process, as those that wait for it fail with 1; or the first."""

    def order(item: tuple[int, "ProcessFailure"]) -> tuple[bool, int]:
        return item[1].exitcode in (1, ENDED_BY_AGENT), item[1].timestamp

    return min(failures.items(), key=order)


def tell_launcher(sentence: str) -> bool:
    """Hand the sentence that ends this rank to its launcher, which prints it once; False without `launch`.

    TORCHELASTIC_ERROR_FILE alone does not count: torchrun shows no sentence, and the variable may be left over.
    """
    file, folder = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get(FOLDER_VARIABLE)
    if not file or not folder or not Path(file).is_relative_to(folder):
        return False
    Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")
    return True
