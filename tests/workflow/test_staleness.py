"""What Snakemake plans again after an edit, in a study that is finished by the look of its files and of its records."""

from typing import Any

import pytest
from study_fixture import TINY, Workflow, copy_workflow

REPORTED = ["report.html", "tables, figures and summary"]
TARGETS = ("all", "gradients", "distributions", "equal_mass")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Empty outputs with Snakemake's own records of them, which it writes for `--touch`."""
    workflow = copy_workflow(tmp_path_factory.mktemp("study"))
    make_finished(workflow, *TARGETS)
    return workflow


def make_finished(workflow: Workflow, *targets: str, study: str = TINY) -> None:
    listed = workflow.run("snakemake", "--dry-run", "--summary", *targets, "--configfile", study).stdout
    outputs = [workflow.folder / line.split("\t")[0] for line in listed.splitlines() if line.startswith("results/")]
    assert outputs, listed
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if path.suffix else (path / "inside").mkdir(parents=True, exist_ok=True)
    (workflow.folder / "results/tiny/benchmarks").mkdir()
    for benchmark in ("equal_mass", "gradients"):
        (workflow.folder / f"results/tiny/benchmarks/{benchmark}.jsonl").touch()
    touched = workflow.run("snakemake", "--touch", "--forceall", "--cores", "1", *targets, "--configfile", study)
    assert touched.returncode == 0, touched.stdout + touched.stderr
    assert workflow.plan(*targets, study=study) == []


def trained(*arms: str) -> list[str]:
    runs = [f"train {arm}, seed {seed}" for arm in arms for seed in (0, 1)]
    return sorted([*runs, *(f"evaluate {arm}" for arm in arms)])


OPERATIONAL: dict[str, Any] = {
    "training.checkpoint_every": 3,
    "training.keep_checkpoints": 5,
    "training.max_skipped": 9,
    "training.rollout_timeout": 77.0,
    "evaluation.rollout_timeout": 78.0,
    "arms.naive": {"training": {"checkpoint_every": 4}},
}


def test_operational_settings_make_nothing_stale(finished: Workflow) -> None:
    study = finished.write_study(OPERATIONAL)
    assert finished.plan(*TARGETS, study=study) == []
    study = finished.write_study({**OPERATIONAL, "arms.naive": {"training": {"warmup_steps": 4}}})
    assert set(trained("naive")) <= set(finished.plan(study=study)), "beside them any other setting still counts"


def test_a_job_that_runs_has_the_operational_settings(finished: Workflow) -> None:
    study = finished.write_study(OPERATIONAL)
    forced = ("snakemake", "--dry-run", "--printshellcmds", "--forceall", *TARGETS, "--configfile", study)
    output = finished.run(*forced).stdout
    (naive,) = [line for line in output.splitlines() if "tailrl job train" in line and "naive/seed0 " in line]
    (evaluation,) = [line for line in output.splitlines() if "tailrl job evaluate" in line and "--arm base" in line]
    compared = [line for line in output.splitlines() if "job distributions" in line or "job equal-mass" in line]
    for given in ('"checkpoint_every":4', '"keep_checkpoints":5', '"max_skipped":9', '"rollout_timeout":77.0'):
        assert given in naive
    assert '"rollout_timeout":78.0' in evaluation
    assert len(compared) == 7 and all('"rollout_timeout":77.0' in line for line in compared)
