"""What Snakemake would answer with a traceback or a wall of options, before it reads a Snakefile: for its profiles."""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def check_call(words: Sequence[str]) -> None:
    """Ends with a sentence where --configfile names no file, or --config no key: Snakemake would end in a traceback.

    Snakemake takes all words behind --configfile for files. Its own parser reads the command line.
    """
    from snakemake.cli import get_argument_parser

    options = get_argument_parser().parse_known_args(list(words[1:]))[0]
    for entry in options.config or ():
        key, separator, value = entry.partition("=")
        if not separator:
            sys.exit(f"tailrl: --config {entry}: write KEY=VALUE; a target stands before --config, or behind --")
        if not re.fullmatch(r"[A-Za-z_][\w-]*\w", key):
            inner = value
            for part in reversed(key.split(".")[1:]):
                inner = f"{{{part}: {inner}}}"
            sys.exit(f"tailrl: --config {entry}: write KEY=VALUE, such as --config '{key.split('.')[0]}={inner}'")
    given = list(map(str, options.configfile))
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
