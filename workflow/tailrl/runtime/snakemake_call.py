"""What Snakemake would answer with a traceback or a wall of options, before it reads a Snakefile: for its profiles."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def check_files(words: Sequence[str]) -> None:
    """Ends with a sentence where a word behind --configfile is no file: Snakemake takes all of them for files."""
    given, reading = [], False
    for word in words:
        reading = word in ("--configfile", "--configfiles") or (reading and not word.startswith("-"))
        if reading and not word.startswith("-"):
            given.append(word)
    missing = [word for word in given if not Path(word).is_file()]
    files = " ".join(word for word in given if word not in missing)
    if missing:
        before = f"; a target stands before: snakemake {' '.join(missing)} --configfile {files}" if files else ""
        sys.exit(f"tailrl: --configfile: there is no file {missing[0]}{before}")


def executor(name: str, pins: str) -> str:
    """The name of an executor; ends with a sentence where Snakemake lacks its plugin."""
    if find_spec(f"snakemake_executor_plugin_{name}") is None:
        sys.exit(
            f"tailrl: profiles/{name}: Snakemake lacks the plugin of this executor: pip install --no-deps -r {pins}"
        )
    return name
