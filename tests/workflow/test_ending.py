"""How a call of Snakemake ends: where to look, and Ctrl-C in one sentence."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from study_fixture import TINY, copy_workflow


@pytest.mark.slow  # the fixture of `tests/e2e/` sees it of the tiny study
def test_a_call_ends_with_where_to_look(tmp_path: Path) -> None:
    workflow = copy_workflow(tmp_path)
    ended = workflow.run("snakemake", "--cores", "1", "overview", "--configfile", TINY)
    assert ended.returncode == 0, ended.stderr
    assert "\nlog: results/overview/overview.log\n" in ended.stderr + ended.stdout
    pages = "results/overview/claims.md, results/overview/index.html"
    assert f"\ntailrl: look at {pages}; next: snakemake --cores all --configfile {TINY}\n" in ended.stderr


@pytest.mark.slow  # `unit/test_cli.py` has it of one job
def test_ctrl_c_is_one_sentence(tmp_path: Path) -> None:
    workflow = copy_workflow(tmp_path)
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            ["snakemake", "--cores", "1", "train_naive", "--configfile", TINY],
            **{"cwd": tmp_path, "env": workflow.environment(), "stdout": said, "stderr": said},
            start_new_session=True,
            # A shell lets its jobs in the background ignore Ctrl-C, and these tests may be one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while not (tmp_path / "results/tiny/logs/policy.log").exists():
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    _, _, after = (tmp_path / "said").read_text().partition("Terminating processes on user request")
    assert after.splitlines()[1:] == [
        "tailrl: stopped: base policy; the same command goes on, training from its last checkpoint"
    ]
    assert workflow.run("tailrl", "unlock").stderr == ""
