"""What Snakemake plans again after an edit, in a study that is finished by the look of its files and of its records."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from study_fixture import ROOT, TINY, Workflow, copy_workflow

from tailrl.config.load import read_study

REPORTED = ["tables, figures and summary"]
PROBLEMS = "results/tiny/data/train.jsonl"
TARGETS = ("all", "gradients", "distributions", "equal_mass")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Empty outputs with Snakemake's own records of them, which it writes for `--touch`."""
    workflow = copy_workflow(tmp_path_factory.mktemp("study"))
    make_finished(workflow, "all")
    return workflow


@pytest.fixture(scope="module")
def finished_whole(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Likewise, with the probes."""
    workflow = copy_workflow(tmp_path_factory.mktemp("study"))
    make_finished(workflow, *TARGETS)
    return workflow


def test_every_rule_that_runs_code_compares_its_digest() -> None:
    """Snakemake tracks no imported code, and an edit while a job runs is older than the job's outputs."""
    files = sorted((ROOT / "workflow/rules").glob("*.smk"))
    rules = [
        rule for file in files for rule in re.split(r"^ *rule\b", file.read_text(encoding="utf-8"), flags=re.M)[1:]
    ]
    coded = [rule for rule in rules if "tailrl job " in rule]
    assert len(coded) > 10
    assert [rule.splitlines()[0] for rule in coded if not re.search(r"^ +sources=", rule, re.M)] == []


def make_finished(workflow: Workflow, *targets: str, study: str = TINY) -> None:
    listed = workflow.run("snakemake", "--dry-run", "--summary", *targets, "--configfile", study).stdout
    outputs = [workflow.folder / line.split("\t")[0] for line in listed.splitlines() if line.startswith("results/")]
    assert outputs, listed
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.suffix:
            (path / "inside").mkdir(parents=True, exist_ok=True)
        elif not path.exists():
            path.write_text('{"outputs": {}}', encoding="utf-8")
    (workflow.folder / "results/tiny/benchmarks").mkdir(exist_ok=True)
    for benchmark in {"equal_mass", "gradients"} & {*targets}:
        (workflow.folder / f"results/tiny/benchmarks/{benchmark}.jsonl").touch()
    touched = workflow.run("snakemake", "--touch", "--forceall", "--cores", "1", *targets, "--configfile", study)
    assert touched.returncode == 0, touched.stdout + touched.stderr
    assert workflow.plan(*targets, study=study) == []


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The workflow's own sentences, without where to look."""
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.removeprefix("tailrl: ") for line in result.stderr.splitlines() if line.startswith("tailrl: ")]
    return [line for line in lines if not line.startswith("look at ")]


def sentences(workflow: Workflow, *targets: str, study: str = TINY) -> list[str]:
    return said(workflow.run("snakemake", "--dry-run", *targets, "--configfile", study))


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


@pytest.mark.long  # the test below
def test_operational_settings_make_no_probe_stale(finished_whole: Workflow) -> None:
    assert finished_whole.plan(*TARGETS, study=finished_whole.write_study(OPERATIONAL)) == []


def test_operational_settings_make_nothing_stale(finished: Workflow) -> None:
    study = finished.write_study(OPERATIONAL)
    assert finished.plan(study=study) == []
    study = finished.write_study({**OPERATIONAL, "arms.naive": {"training": {"warmup_steps": 4}}})
    assert set(trained("naive")) <= set(finished.plan(study=study)), "beside them any other setting still counts"


def test_a_job_that_runs_has_the_operational_settings(tmp_path: Path) -> None:
    """Here a job only says its settings, and ends with an error."""
    workflow = copy_workflow(tmp_path / "study")
    study = workflow.write_study(OPERATIONAL)
    for name in ("base/config.json", "data/train.jsonl", "data/evaluation.jsonl"):
        (workflow.folder / "results/tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        (workflow.folder / "results/tiny" / name).touch()
    stub = tmp_path / "bin/tailrl"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nwhile [ "$1" != --settings ]; do shift; done; cat "$2" >&2; exit 1\n', encoding="utf-8")
    stub.chmod(0o755)
    engines = read_study(ROOT / TINY).distributions.engines
    compared = [f"distributions/{engine}/run.json" for engine in engines] + ["distributions/equal_mass.csv"]
    targets = [f"results/tiny/{name}" for name in ("train/naive/seed0/run.json", "eval/base.json", *compared)]
    words = (
        "--cores",
        "2",
        "--allowed-rules",
        "train",
        "evaluate",
        "compare",
        "equal_mass_table",
        "--configfile",
        study,
    )
    path = f"{stub.parent}:{workflow.environment()['PATH']}"
    ended = workflow.run("snakemake", *words, "--", *targets, PATH=path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    logs = workflow.folder / "results/tiny/logs"
    naive, evaluation = (
        json.loads((logs / f"{name}.log").read_text()) for name in ("train/naive/seed0", "evaluate/base")
    )
    kept = [
        naive["training"][key] for key in ("checkpoint_every", "keep_checkpoints", "max_skipped", "rollout_timeout")
    ]
    assert kept == [4, 5, 9, 77.0]
    assert evaluation["rollout_timeout"] == 78.0
    probes = [*logs.glob("distributions/*.log"), logs / "equal_mass.log"]
    assert len(probes) == len(engines) + 1 == 7
    assert {json.loads(log.read_text())["rollout_timeout"] for log in probes} == {77.0}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "offered"), [("1", True), ("2", False)])
def test_a_job_of_several_ranks_is_offered_no_server(tmp_path: Path, ranks: str, offered: bool) -> None:
    """It starts its own processes. Here it only says what it was offered."""
    workflow = copy_workflow(tmp_path / "study")
    for name in ("base/config.json", "data/train.jsonl"):
        (workflow.folder / "results/tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        (workflow.folder / "results/tiny" / name).touch()
    stub = tmp_path / "bin/tailrl"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "offered:$TAILRL_JOB_SERVER" >&2; exit 1\n', encoding="utf-8")
    stub.chmod(0o755)
    words = ("--allowed-rules", "train", "--set-resources", f"train:ranks={ranks}", "--configfile", TINY)
    path = f"{stub.parent}:{workflow.environment()['PATH']}"
    ended = workflow.run(
        "snakemake", "--cores", "1", *words, "--", "results/tiny/train/naive/seed0/run.json", PATH=path
    )
    log = (workflow.folder / "results/tiny/logs/train/naive/seed0.log").read_text(encoding="utf-8")
    assert ended.returncode == 1 and log.startswith("offered:")
    assert (log != "offered:\n") == offered


# --- what runs again -----------------------------------------------------------------------------------


def test_what_an_edit_changes_runs_again_and_nothing_else(finished: Workflow) -> None:
    runs = sorted([*trained("naive", "dvp_mis"), *REPORTED])
    with finished.edited("workflow/tailrl/objective/loss.py", '"""The loss of an arm', '"""A loss of an arm'):
        assert finished.plan() == runs
    with finished.edited(TINY, "steps: 3", "steps: 4"):
        assert finished.plan() == runs
    with finished.edited(TINY, "arms:\n", "arms:\n  more: {}\n"):
        assert finished.plan() == sorted([*trained("more"), *REPORTED])


def test_a_data_file_is_an_input(tmp_path: Path) -> None:
    """Were it not, a new version of the file would leave the old problems in place."""
    workflow = copy_workflow(tmp_path)
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n", encoding="utf-8")
    study = workflow.write_study({"evaluation.task": {"name": "aime25", "path": "problems.jsonl"}})
    make_finished(workflow, PROBLEMS, study=study)
    data.write_text("{}\n{}\n", encoding="utf-8")
    assert workflow.plan(PROBLEMS, study=study) == ["problems of the study tiny"]


# --- moved results ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_results_that_move_keep_their_times_or_are_touched(tmp_path: Path) -> None:
    """As docs/how-to/move-results.md says."""
    workflow = copy_workflow(tmp_path / "study")
    make_finished(workflow, "all")
    # So that the copies' times are in another order than those of the originals.
    for folder, copy in (("cp_a", shutil.copy2), ("cp_r", shutil.copyfile)):
        shutil.copytree(workflow.folder, tmp_path / folder, copy_function=copy, symlinks=True)
    for file in (tmp_path / "cp_r/results/tiny/data").iterdir():
        os.utime(file)
    assert Workflow(tmp_path / "cp_a").plan() == []
    copied = Workflow(tmp_path / "cp_r")
    assert set(trained("naive")) <= set(copied.plan())
    touched = copied.run("snakemake", "--touch", "--cores", "1", "--configfile", TINY)
    assert touched.returncode == 0, touched.stdout + touched.stderr
    assert copied.plan() == []


# --- the guides of docs/how-to/your-task.md -----------------------------------------------------------


@pytest.mark.slow
def test_an_added_task_and_remedy_make_no_other_run_stale(tmp_path: Path) -> None:
    """As docs/how-to/your-task.md says to add them; the arm that uses the remedy depends on it, and no other."""
    workflow = copy_workflow(tmp_path)
    make_finished(workflow, *TARGETS)
    for name in ("backwards", "root"):
        applied = workflow.run("git", "apply", str(ROOT / f"examples/own_code/{name}.patch"))
        assert applied.returncode == 0, applied.stderr
    assert workflow.plan(*TARGETS) == []
    with workflow.edited(TINY, "arms:\n", "arms:\n  root: {correction: {sequence: root}}\n"):
        assert workflow.plan() == sorted([*trained("root"), *REPORTED])
        make_finished(workflow, "all")
        with workflow.edited("workflow/tailrl/objective/remedies/root.py", "def weigh(", "# Edited.\ndef weigh("):
            assert workflow.plan() == sorted([*trained("root"), *REPORTED])


# --- an edit while a job runs --------------------------------------------------------------------------


@pytest.mark.long  # `training/test_results.py` and `artifacts/test_manifest.py` have it without Snakemake
def test_a_source_file_edited_while_its_job_runs_is_seen(tmp_path: Path) -> None:
    """By the job, at the end of Snakemake, and at its next start, which makes the result again."""
    workflow, folder = copy_workflow(tmp_path), tmp_path / "workflow/tailrl/tasks"
    lines = (
        f"if __import__('os').path.exists({str(tmp_path / 'edit')!r}):",
        f"    __import__('os').unlink({str(tmp_path / 'edit')!r})",
        f"    open({str(folder / 'loaded.py')!r}, 'a').write('# Edited.')",
    )
    with (folder / "prepare.py").open("a", encoding="utf-8") as file:
        file.write("\n".join(["", *lines, ""]))
    (tmp_path / "edit").touch()
    command = ("snakemake", "--cores", "1", PROBLEMS, "--configfile", TINY)
    first, log = workflow.run(*command), tmp_path / "results/tiny/logs/problems.log"
    edited = "tailrl/tasks/loaded.py"
    sentence = f"{edited} changed while this job ran; its results stay, and the next snakemake makes them again"
    assert said(first) == [sentence]
    assert log.read_text(encoding="utf-8") == f"tailrl: {sentence}\n"
    assert (tmp_path / "results/tiny/data/train.jsonl").stat().st_size
    assert said(workflow.run(*command)) == []
    assert log.read_text(encoding="utf-8") == ""
    third = workflow.run(*command)
    assert said(third) == [] and "Nothing to be done" in third.stdout + third.stderr


# --- a name that two files give ------------------------------------------------------------------------


def test_another_study_of_the_same_name_is_refused(finished: Workflow) -> None:
    mine = finished.write_study({"training.steps": 7}, name="mine.yaml")
    note = finished.folder / "results/tiny/study_file"
    note.write_text(f"{TINY}\n", encoding="utf-8")
    refused = finished.refuse("--cores", "1", PROBLEMS, "--forcerun", "problems", "--configfile", mine)
    note.unlink()
    assert refused.returncode == 1 and "Traceback" not in refused.stderr and "Execute" not in refused.stderr
    assert (
        f"mine.yaml and {TINY} both name their study 'tiny', but differ in training.steps: "
        f"results/tiny holds the results of {TINY}; give mine.yaml another name\n"
    ) in refused.stderr


@pytest.mark.long  # the test above
def test_a_second_study_of_the_same_name_is_refused(tmp_path: Path) -> None:
    workflow, problems = copy_workflow(tmp_path), tmp_path / "results/tiny/data/train.jsonl"
    command = ("snakemake", "--cores", "1", PROBLEMS, "--configfile")
    assert said(workflow.run(*command, TINY)) == []
    assert (tmp_path / "results/tiny/study_file").read_text(encoding="utf-8") == f"{TINY}\n"
    mine = workflow.write_study({"training.steps": 7, "task.problems": 60}, name="mine.yaml")
    before = problems.read_text()
    sentence = (
        f"mine.yaml and {TINY} both name their study 'tiny', but differ in task.problems, training.steps: "
        f"results/tiny holds the results of {TINY}; give mine.yaml another name"
    )
    refused = workflow.refuse(*command[1:], mine)
    assert refused.returncode == 1 and f"{sentence}\n" in refused.stderr
    assert "Traceback" not in refused.stderr and "Execute" not in refused.stderr
    assert problems.read_text() == before
    assert sentences(workflow, PROBLEMS, study=mine) == [], "a dry run goes on"
    # The same file may change, also when its checkout has moved; a file that is gone has no say.
    with workflow.edited(TINY, "problems: 64", "problems: 63"):
        assert workflow.plan(PROBLEMS) == ["problems of the study tiny"]
    (tmp_path / TINY).rename(tmp_path / "renamed.yaml")
    assert said(workflow.run(*command, mine)) == []
    assert (tmp_path / "results/tiny/study_file").read_text(encoding="utf-8") == "mine.yaml\n"
    assert len(problems.read_text().splitlines()) < len(before.splitlines())
