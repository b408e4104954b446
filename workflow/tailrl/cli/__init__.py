"""The command line.

`commands` has the commands for people, `jobs` those for the workflow's rules. Heavy libraries are imported inside them.
"""

import os
import sys

OFFER = "TAILRL_JOB_SERVER"
"""Set by the Snakefile: the id of Snakemake's process, with which a server ends, what jobs import (see `job_server`),
and a private folder, in which servers have their sockets: no other user reaches one.

Jobs of several ranks, which start their own processes, are offered none."""


def main() -> None:
    """Entry point of `tailrl`. A job that a server takes needs no more than `ask` here."""
    # Keep libraries' progress bars and advice out of a job's log.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.argv[1:2] in (["demo"], ["diagnose"]):
        # A log's products are short: NumPy's other threads would only wait, and count as time of the processor.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if OFFER in os.environ:
        from tailrl.cli.job_client import ask

        ask()
    from tailrl.cli.command_line import run

    run()
