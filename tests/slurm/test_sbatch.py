"""What jobs ask Slurm for: the words that the plugin gives to sbatch, without a Slurm."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from study_fixture import Workflow, copy_workflow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("snakemake_executor_plugin_slurm") is None, reason="envs/slurm.txt is not installed"
    ),
]
SBATCH = """#!/bin/sh
printf '%s\\n' "$*" | head -1 >> {notes}
exit 1
"""
CHANGES = {
    "name": "changed",
    "seeds": [0],
    "ablations": {},
    "arms": {"naive": {}},
    "policy": {"source": "pretrained", "path": "Qwen/Qwen3-14B-Base"},
    "training.steps": 500,
    "training.max_new_tokens": 8192,
    "training.snapshot_every": 100,
    "training.dtype": "bfloat16",
}


def asked(workflow: Workflow, folder: Path, *options: str) -> dict[str, dict[str, str]]:
    """The options of sbatch for each rule's job that can start."""
    notes, command = folder / "notes", folder / "bin" / "sbatch"
    command.parent.mkdir(exist_ok=True)
    command.write_text(SBATCH.format(notes=shlex.quote(str(notes))))
    command.chmod(0o755)
    # Of the cluster the plugin only asks whether there is such an account.
    (command.parent / "sacctmgr").write_text("#!/bin/sh\necho a\n")
    (command.parent / "sacctmgr").chmod(0o755)
    notes.write_text("")
    environment = workflow.environment() | {
        "PYTHONPATH": os.pathsep.join([str(workflow.folder / "workflow"), *sys.path])
    }
    environment["PATH"] = f"{command.parent}:{environment['PATH']}"
    study = workflow.write_study(CHANGES)
    results = workflow.folder / "results" / "changed"
    for name in ("train.jsonl", "evaluation.jsonl", "warm_start.jsonl", "problems.json", "manifest.json"):
        (results / "data").mkdir(parents=True, exist_ok=True)
        (results / "data" / name).touch()
    (results / "base").mkdir(exist_ok=True)
    words = ["snakemake", "train_naive", "results/changed/eval/base.json", "--profile", "profiles/slurm", *options]
    words += ["--configfile", study, "--rerun-triggers", "mtime", "--retries", "0"]
    profile = workflow.folder / "profiles/slurm/profile.yaml"
    text = profile.read_text().replace(
        "default-resources:", "default-resources:\n  slurm_account: a\n  slurm_partition: p"
    )
    profile.write_text(text)
    ended = subprocess.run(
        words, cwd=workflow.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    found = {}
    for line in notes.read_text().splitlines():
        if rule := re.search(r"--comment '?rule_([a-z]+)", line):
            found[rule[1]] = dict(re.findall(r"(?:^| )(--?[a-z-]+)[ =](\S+)", line))
    assert {"train", "evaluate"} <= found.keys(), ended.stdout + ended.stderr
    return found


def test_sizes_come_from_the_plan_and_a_job_is_on_one_node(tmp_path: Path) -> None:
    """A policy of 14 billion parameters, 59 GB in float32: eight ranks share its file, and one writes it whole."""
    workflow = copy_workflow(tmp_path / "study")
    found = asked(workflow, tmp_path, "--set-resources", "train:ranks=8")
    train, evaluate = found["train"], found["evaluate"]
    assert (train["--gpus"], train["--nodes"], train["-t"]) == ("8", "1", "1440")
    assert 2 * 59_000 + 8 * 12_000 < int(train["--mem"]) < 300_000
    assert (evaluate["--gpus"], evaluate["--nodes"]) == ("1", "1")
    assert 59_000 < int(evaluate["--mem"]) < 80_000
