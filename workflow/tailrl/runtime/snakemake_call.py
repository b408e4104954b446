"""What the profiles of an executor ask: whether Snakemake has its plugin."""

import sys
from importlib.util import find_spec


def executor(name: str, pins: str) -> str:
    """The name of an executor; ends with a sentence where Snakemake lacks its plugin."""
    if find_spec(f"snakemake_executor_plugin_{name}") is None:
        sys.exit(
            f"tailrl: profiles/{name}: Snakemake lacks the plugin of this executor: pip install --no-deps -r {pins}"
        )
    return name
