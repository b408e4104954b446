"""One finished tiny study, with the real engines, for all the tests in this folder: they leave it as they find it."""

import pytest
from study_fixture import TINY, Workflow, copy_workflow


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    workflow = copy_workflow(tmp_path_factory.mktemp("study"))
    result = workflow.run("snakemake", "--cores", "2", "--configfile", TINY)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    assert "\ntailrl: look at results/tiny/summary.html\n" in result.stderr
    return workflow
