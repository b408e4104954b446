"""One finished tiny study, with the real engines, for all the tests in this folder: they leave it as they find it."""

import job_server
import pytest
from study_fixture import TINY, Workflow, copy_workflow


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Its jobs are forks of one process, which has imported torch and vLLM."""
    workflow = copy_workflow(tmp_path_factory.mktemp("study"))
    with job_server.serving() as forked:
        result = workflow.run("snakemake", "--cores", "2", "--configfile", TINY, **forked)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    return workflow
