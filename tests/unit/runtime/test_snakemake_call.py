"""What Snakemake's profiles refuse in one sentence."""

import pytest

from tailrl.runtime.snakemake_call import executor


def test_an_executor_needs_its_plugin() -> None:
    with pytest.raises(SystemExit, match=r"^tailrl: profiles/nowhere: Snakemake lacks the plugin .* -r envs/x\.txt$"):
        executor("nowhere", "envs/x.txt")
