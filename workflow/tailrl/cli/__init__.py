"""The command line.

`commands` has the commands for people, `jobs` those for the workflow's rules. Heavy libraries are imported inside them.
"""

import os

from tailrl.cli.job_client import ask


def main() -> None:
    """Entry point of `tailrl`. A job that a server takes needs no more than `ask` here."""
    # Keep libraries' progress bars and advice out of a job's log.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ask()
    from tailrl.cli.command_line import run

    run()
